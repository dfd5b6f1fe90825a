#include "../bwd.cuh"

namespace flash_attn::sm80 {

template void launch_bwd_with_scores<DType::kFp16, 64>(const OfSequences<BwdParams>&, Stream);
template void launch_bwd_with_scores<DType::kBf16, 64>(const OfSequences<BwdParams>&, Stream);
template void launch_bwd_bias<DType::kFp16, 64>(const BwdParams&, Stream);
template void launch_bwd_bias<DType::kBf16, 64>(const BwdParams&, Stream);

}  // namespace flash_attn::sm80
