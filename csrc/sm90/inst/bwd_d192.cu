#include "../bwd_pair.cuh"

namespace flash_attn::sm90 {

template void launch_bwd_pair<DType::kFp16, 192, 128>(const BwdParams&, const cuda::DeviceInfo&,
                                                      Stream);
template void launch_bwd_pair<DType::kBf16, 192, 128>(const BwdParams&, const cuda::DeviceInfo&,
                                                      Stream);
template void launch_bwd_pair<DType::kFp16, 192, 192>(const BwdParams&, const cuda::DeviceInfo&,
                                                      Stream);
template void launch_bwd_pair<DType::kBf16, 192, 192>(const BwdParams&, const cuda::DeviceInfo&,
                                                      Stream);

}  // namespace flash_attn::sm90
