#include "decode.h"

#include "../dispatch.h"
#include "combine.cuh"
#include "config.h"
#include "prefix_config.h"

namespace flash_attn::cuda {
namespace {

struct RowsGrid {
  Divisor columns, seqlen_q, heads_q;  // columns in fours
  int rows, rows_of_block;
};
constexpr int kRowsThreads = 256;

// Merges rows of sequences that are cut alike. A thread takes all pieces of its four columns.
__global__ void __launch_bounds__(kRowsThreads)
    combine_rows_kernel(const __grid_constant__ DecodeParams params,
                        const __grid_constant__ RowsGrid grid) {
  const int row_of_block = grid.columns.divide(threadIdx.x);
  const int row = blockIdx.x * grid.rows_of_block + row_of_block;
  const int col = threadIdx.x * 4 - row_of_block * params.head_dim_v;
  const int sequence_head = grid.seqlen_q.divide(row);
  const int batch_idx = grid.heads_q.divide(sequence_head);
  const int token = row - sequence_head * params.seqlen_q;
  const int head = sequence_head - batch_idx * params.heads_q;
  ptx::wait_for_prerequisites();
  if (row >= grid.rows) return;
  const SequencePieces pieces = {batch_idx, params.splits.count, batch_idx, batch_idx,
                                 params.batch};
  const MergeState state =
      merge_pieces(params, pieces, head * params.seqlen_q + token, col, /*first=*/0, /*step=*/1);
  store_merged(params, OutputRow(params, batch_idx, head, token), head, col, state,
               merge_reference(state.max_lse));
}

void launch_combine_rows(const DecodeParams& params, int64_t rows, Stream stream) {
  const int columns = params.head_dim_v / 4, rows_of_block = kRowsThreads / columns;
  const int64_t blocks = (rows + rows_of_block - 1) / rows_of_block;
  launch_overlapping<combine_rows_kernel>(static_cast<unsigned>(blocks), rows_of_block * columns, 0,
                                          /*overlap=*/true, stream, params,
                                          RowsGrid{.columns = Divisor(columns),
                                                   .seqlen_q = Divisor(params.seqlen_q),
                                                   .heads_q = Divisor(params.heads_q),
                                                   .rows = static_cast<int>(rows),
                                                   .rows_of_block = rows_of_block});
}

void combine(const DecodeParams& params, const SharedPrefix& prefix, Stream stream) {
  constexpr int64_t kManyRows = 2048;
  const int64_t rows = int64_t{params.batch} * params.heads_q * params.seqlen_q;
  const bool alike = params.splits.keys == 0 && prefix.pieces == 0 && !params.splits.in_any_batch;
  if (alike && rows >= kManyRows) return launch_combine_rows(params, rows, stream);
  // By length all blocks are alike, in four groups of threads, whatever the other sequences.
  const int pieces =
      params.splits.keys > 0 ? kPiecesAtOnce * kPiecesAtOnce : params.splits.count + prefix.pieces;
  launch_combine<PiecesOfDecode>(params, {}, prefix, rows, pieces, params.splits.in_any_batch,
                                 stream);
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
