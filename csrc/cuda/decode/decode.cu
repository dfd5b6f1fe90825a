#include "decode.h"

#include "../dispatch.h"
#include "combine.cuh"
#include "config.h"
#include "prefix_config.h"

namespace flash_attn::cuda {
namespace {

void combine(const DecodeParams& params, const SharedPrefix& prefix, Stream stream) {
  // By length all blocks are alike, in four groups of threads, whatever the other sequences.
  const int pieces =
      params.splits.keys > 0 ? kPiecesAtOnce * kPiecesAtOnce : params.splits.count + prefix.pieces;
  launch_combine<PiecesOfDecode>(params, {}, prefix,
                                 int64_t{params.batch} * params.heads_q * params.seqlen_q, pieces,
                                 params.splits.in_any_batch, stream);
}

// As core/params.h has it, of a cache that decode.cuh serves.
bool is_plain(const DecodeParams& params) {
  return params.score.softcap == 0 && params.score.alibi_slopes == nullptr &&
         params.score.bias.data == nullptr && params.rotary_cos == nullptr;
}

template <DType kDType>
void launch_with_terms(const DecodeParams& params, Stream stream) {
  constexpr bool kPlain = false;
  const int head_dim = params.widest_head_dim();
  if (head_dim <= 64) return launch_decode<kDType, 64, kPlain>(params, stream);
  if (head_dim <= 128) return launch_decode<kDType, 128, kPlain>(params, stream);
  if (head_dim <= 192) return launch_decode<kDType, 192, kPlain>(params, stream);
  launch_decode<kDType, kDecodeHeadDim, kPlain>(params, stream);
}

}  // namespace

void run_decode(const DecodeParams& params, Stream stream) {
  constexpr bool kPlain = true;
  const auto run_8bit = [&]<DType kCacheDType> {
    params.widest_head_dim() <= 64
        ? launch_decode<kCacheDType, 64, kPlain>(params, stream)
        : launch_decode<kCacheDType, kDecode8BitHeadDim, kPlain>(params, stream);
  };
  if (params.cache_dtype == DType::kFp8E4M3) {
    run_8bit.template operator()<DType::kFp8E4M3>();
  } else if (params.cache_dtype == DType::kInt8) {
    run_8bit.template operator()<DType::kInt8>();
  } else {
    with_dtype(params.dtype, [&]<DType kDType> {
      if (!is_plain(params)) return launch_with_terms<kDType>(params, stream);
      with_head_dim_class(params.widest_head_dim(), [&]<int kHeadDim> {
        launch_decode<kDType, kHeadDim, kPlain>(params, stream);
      });
    });
  }
  if (is_cut(params.splits)) run_decode_combine(params, stream);
}

void run_decode_combine(const DecodeParams& params, Stream stream) { combine(params, {}, stream); }

void run_decode_shared(const DecodeParams& params, const SharedPrefix& prefix, Stream stream) {
  DecodeParams own = params;
  own.leftpad_k = prefix.lens;  // all that is not shared
  with_dtype(params.dtype, [&]<DType kDType> {
    if (params.head_dim <= 64) return launch_prefix<kDType, 64>(own, prefix, stream);
    if (params.head_dim <= 128) return launch_prefix<kDType, 128>(own, prefix, stream);
    launch_prefix<kDType, kPrefixHeadDim>(own, prefix, stream);
  });
  combine(params, prefix, stream);
}

}  // namespace flash_attn::cuda
