#include "../bwd.cuh"

namespace flash_attn::sm80 {

template void launch_bwd<DType::kFp16, 256>(const BwdParams&, const cuda::DeviceInfo&, Stream);
template void launch_bwd<DType::kBf16, 256>(const BwdParams&, const cuda::DeviceInfo&, Stream);

}  // namespace flash_attn::sm80
