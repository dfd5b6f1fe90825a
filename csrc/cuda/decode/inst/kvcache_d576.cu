#include "../kvcache.cuh"

namespace flash_attn::cuda {

template void launch_kvcache<DType::kFp16, 576>(const DecodeParams&, const KvcacheGrid&, Stream);
template void launch_kvcache<DType::kBf16, 576>(const DecodeParams&, const KvcacheGrid&, Stream);

}  // namespace flash_attn::cuda
