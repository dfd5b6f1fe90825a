#include "../bwd_wide.cuh"

namespace flash_attn::sm80 {

template void launch_bwd_wide<DType::kFp32, 256, true>(const BwdParams&, const cuda::DeviceInfo&,
                                                       Stream);
template void launch_bwd_wide<DType::kTf32, 256, true>(const BwdParams&, const cuda::DeviceInfo&,
                                                       Stream);

}  // namespace flash_attn::sm80
