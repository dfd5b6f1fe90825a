#include "../fwd.cuh"

namespace flash_attn::sm80 {

template void launch_fwd_wide<DType::kFp32, 256, true>(const FwdParams&, Stream);
template void launch_fwd_wide<DType::kTf32, 256, true>(const FwdParams&, Stream);

}  // namespace flash_attn::sm80
