#include "../decode.cuh"

namespace flash_attn::cuda {

template void launch_decode<DType::kFp16, 128, /*kPlain=*/true>(const DecodeParams&, Stream);
template void launch_decode<DType::kBf16, 128, /*kPlain=*/true>(const DecodeParams&, Stream);
template void launch_decode<DType::kFp8E4M3, 128, /*kPlain=*/true>(const DecodeParams&, Stream);
template void launch_decode<DType::kInt8, 128, /*kPlain=*/true>(const DecodeParams&, Stream);

}  // namespace flash_attn::cuda
