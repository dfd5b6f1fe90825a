#include "../bwd_pair.cuh"

namespace flash_attn::sm90 {

template void launch_bwd_pair<DType::kFp16, 256, 256>(const BwdParams&, const cuda::DeviceInfo&,
                                                      Stream);
template void launch_bwd_pair<DType::kBf16, 256, 256>(const BwdParams&, const cuda::DeviceInfo&,
                                                      Stream);

}  // namespace flash_attn::sm90
