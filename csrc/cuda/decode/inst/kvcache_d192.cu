#include "../kvcache.cuh"

namespace flash_attn::cuda {

template void launch_kvcache<DType::kFp8E4M3, 192>(const DecodeParams&, const KvcacheGrid&, Stream);
template void launch_kvcache<DType::kInt8, 192>(const DecodeParams&, const KvcacheGrid&, Stream);

}  // namespace flash_attn::cuda
