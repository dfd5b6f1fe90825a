#include "../bwd_launch.cuh"

namespace flash_attn::sm90 {

template void launch_bwd_masked<DType::kFp16, 64>(const Masked<BwdParams>&, const MaskOrder&,
                                                  const cuda::DeviceInfo&, Stream);
template void launch_bwd_masked<DType::kBf16, 64>(const Masked<BwdParams>&, const MaskOrder&,
                                                  const cuda::DeviceInfo&, Stream);

}  // namespace flash_attn::sm90
