#include "../fwd_large_head.cuh"

namespace flash_attn::sm80 {

template void launch_fwd_large_head<DType::kFp16, 384, false>(const FwdParams&,
                                                              const cuda::DeviceInfo&, Stream);
template void launch_fwd_large_head<DType::kBf16, 384, false>(const FwdParams&,
                                                              const cuda::DeviceInfo&, Stream);

}  // namespace flash_attn::sm80
