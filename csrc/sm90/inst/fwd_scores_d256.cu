#include "../fwd.cuh"

namespace flash_attn::sm90 {

template void launch_fwd_with_scores<DType::kFp16, 256>(const FwdParams&, const cuda::DeviceInfo&,
                                                        Stream);
template void launch_fwd_with_scores<DType::kBf16, 256>(const FwdParams&, const cuda::DeviceInfo&,
                                                        Stream);

}  // namespace flash_attn::sm90
