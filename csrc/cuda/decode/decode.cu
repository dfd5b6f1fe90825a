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
  const bool by_length = params.splits.keys > 0;
  // By length all blocks are alike, in four groups of threads, whatever the other sequences.
  const int pieces = by_length ? kPiecesAtOnce * kPiecesAtOnce : params.splits.count;
  launch_combine<PiecesOfDecode>(params, {},
                                 int64_t{params.batch} * params.heads_q * params.seqlen_q, pieces,
                                 /*in_any_batch=*/by_length, stream);
}

}  // namespace flash_attn::cuda
