#include "decode.h"

#include "../dispatch.h"
#include "combine.cuh"
#include "config.h"

namespace flash_attn::cuda {

void run_decode(const DecodeParams& params, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> {
    with_head_dim_class(params.head_dim,
                        [&]<int kHeadDim> { launch_decode<kDType, kHeadDim>(params, stream); });
  });
  if (is_cut(params.splits)) run_decode_combine(params, stream);
}

void run_decode_combine(const DecodeParams& params, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> { launch_decode_combine<kDType>(params, stream); });
}

}  // namespace flash_attn::cuda
