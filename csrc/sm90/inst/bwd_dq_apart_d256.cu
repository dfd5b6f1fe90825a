#include "../bwd_wide_dq.cuh"

namespace flash_attn::sm90 {

template void launch_bwd_dq_apart<DType::kFp16, 256>(const BwdParams&, const cuda::DeviceInfo&,
                                                     Stream);
template void launch_bwd_dq_apart<DType::kBf16, 256>(const BwdParams&, const cuda::DeviceInfo&,
                                                     Stream);

}  // namespace flash_attn::sm90
