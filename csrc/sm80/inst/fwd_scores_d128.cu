#include "../fwd.cuh"

namespace flash_attn::sm80 {

template void launch_fwd_with_scores<DType::kFp16, 128>(const OfSequences<FwdParams>&, Stream);
template void launch_fwd_with_scores<DType::kBf16, 128>(const OfSequences<FwdParams>&, Stream);

}  // namespace flash_attn::sm80
