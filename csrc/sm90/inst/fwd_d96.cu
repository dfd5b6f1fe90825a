#include "../fwd.cuh"

namespace flash_attn::sm90 {

template void launch_fwd<DType::kFp16, 96, 96>(const FwdParams&, const cuda::DeviceInfo&, Stream);
template void launch_fwd<DType::kBf16, 96, 96>(const FwdParams&, const cuda::DeviceInfo&, Stream);

}  // namespace flash_attn::sm90
