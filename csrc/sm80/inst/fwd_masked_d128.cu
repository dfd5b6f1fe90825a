#include "../fwd.cuh"

namespace flash_attn::sm80 {

template void launch_fwd_masked<DType::kFp16, 128>(const Masked<FwdParams>&, Stream);
template void launch_fwd_masked<DType::kBf16, 128>(const Masked<FwdParams>&, Stream);

}  // namespace flash_attn::sm80
