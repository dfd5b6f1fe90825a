#include "../fwd.cuh"

namespace flash_attn::sm90 {

template void launch_fwd_masked<DType::kFp16, 256>(const Masked<FwdParams>&, const MaskOrder&,
                                                   const cuda::DeviceInfo&, Stream);
template void launch_fwd_masked<DType::kBf16, 256>(const Masked<FwdParams>&, const MaskOrder&,
                                                   const cuda::DeviceInfo&, Stream);

}  // namespace flash_attn::sm90
