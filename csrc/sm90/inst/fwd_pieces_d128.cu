#include "../fwd.cuh"

namespace flash_attn::sm90 {

template void launch_fwd_in_pieces<DType::kFp16, 128>(const FwdInPieces&, const cuda::DeviceInfo&,
                                                      Stream);
template void launch_fwd_in_pieces<DType::kBf16, 128>(const FwdInPieces&, const cuda::DeviceInfo&,
                                                      Stream);

}  // namespace flash_attn::sm90
