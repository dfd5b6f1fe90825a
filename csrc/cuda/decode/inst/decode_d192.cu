#include "../decode.cuh"

namespace flash_attn::cuda {

template void launch_decode<DType::kFp16, 192, /*kPlain=*/true>(const DecodeParams&, Stream);
template void launch_decode<DType::kBf16, 192, /*kPlain=*/true>(const DecodeParams&, Stream);

}  // namespace flash_attn::cuda
