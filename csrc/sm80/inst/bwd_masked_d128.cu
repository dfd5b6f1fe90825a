#include "../bwd_masked.cuh"

namespace flash_attn::sm80 {

template void launch_bwd_masked<DType::kFp16, 128>(const Masked<BwdParams>&, Stream);
template void launch_bwd_masked<DType::kBf16, 128>(const Masked<BwdParams>&, Stream);

}  // namespace flash_attn::sm80
