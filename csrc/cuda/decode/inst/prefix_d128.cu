#include "../prefix.cuh"

namespace flash_attn::cuda {

template void launch_prefix<DType::kFp16, 128>(const DecodeParams&, const SharedPrefix&, Stream);
template void launch_prefix<DType::kBf16, 128>(const DecodeParams&, const SharedPrefix&, Stream);

}  // namespace flash_attn::cuda
