#include "../bwd_bias.cuh"

namespace flash_attn::sm90 {

template void launch_bwd_bias<DType::kFp16, 128>(const BwdParams&, const cuda::DeviceInfo&, Stream);
template void launch_bwd_bias<DType::kBf16, 128>(const BwdParams&, const cuda::DeviceInfo&, Stream);

}  // namespace flash_attn::sm90
