#include "../bwd_pair.cuh"

namespace flash_attn::sm90 {

template void launch_bwd_pair_masked<DType::kFp16, 192>(const Masked<BwdParams>&, const MaskOrder&,
                                                        const cuda::DeviceInfo&, Stream);
template void launch_bwd_pair_masked<DType::kBf16, 192>(const Masked<BwdParams>&, const MaskOrder&,
                                                        const cuda::DeviceInfo&, Stream);

}  // namespace flash_attn::sm90
