#include "../decode.cuh"

namespace flash_attn::cuda {

template void launch_decode<DType::kFp16, 256, /*kPlain=*/false>(const DecodeParams&, Stream);
template void launch_decode<DType::kBf16, 256, /*kPlain=*/false>(const DecodeParams&, Stream);

}  // namespace flash_attn::cuda
