#include "../fwd.cuh"

namespace flash_attn::sm90 {

template void launch_fwd_with_bias<DType::kFp16, 128>(const FwdParams&, const cuda::DeviceInfo&,
                                                      Stream);
template void launch_fwd_with_bias<DType::kBf16, 128>(const FwdParams&, const cuda::DeviceInfo&,
                                                      Stream);

}  // namespace flash_attn::sm90
