#include "../kvcache.cuh"

namespace flash_attn::cuda {

template void launch_kvcache<DType::kFp32, 64>(const DecodeParams&, const KvcacheGrid&, Stream);

}  // namespace flash_attn::cuda
