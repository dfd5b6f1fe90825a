#include "../bwd_launch.cuh"

namespace flash_attn::sm90 {

template void launch_bwd<DType::kFp16, 128>(const BwdParams&, const cuda::DeviceInfo&, Stream);
template void launch_bwd<DType::kBf16, 128>(const BwdParams&, const cuda::DeviceInfo&, Stream);

}  // namespace flash_attn::sm90
