#include "../latent.cuh"

namespace flash_attn::sm90 {

template void launch_latent<DType::kFp16>(const DecodeParams&, const KvcacheGrid&, Stream);
template void launch_latent<DType::kBf16>(const DecodeParams&, const KvcacheGrid&, Stream);

}  // namespace flash_attn::sm90
