#include "../bwd_large_head.cuh"

namespace flash_attn::sm80 {

template void launch_bwd_large_head<DType::kFp16, false>(const BwdParams&, Stream);
template void launch_bwd_large_head<DType::kBf16, false>(const BwdParams&, Stream);

}  // namespace flash_attn::sm80
