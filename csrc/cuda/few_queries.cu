#include "few_queries.h"

#include <algorithm>
#include <cmath>

#include "attn/seqlen.cuh"
#include "launch.h"
#include "ptx/griddepcontrol.cuh"

namespace flash_attn::cuda {
namespace {

constexpr int kThreads = 128, kDealThreads = 256, kChunkBytes = sizeof(uint4);

__host__ __device__ int element_bytes(const AttnParams& params) {
  return params.dtype == DType::kFp16 || params.dtype == DType::kBf16 ? 2 : 4;
}

// A query's row of all heads in chunks of 16 bytes.
struct HeadChunks {
  int element_bytes, of_head, of_row;

  __device__ HeadChunks(const AttnParams& params, int head_dim)
      : element_bytes(cuda::element_bytes(params)),
        of_head(head_dim * element_bytes / kChunkBytes),
        of_row(of_head * params.heads_q) {}

  // Chunk i of row `row` of a tensor whose sequence this is.
  template <typename Byte>
  __device__ Byte* at(Byte* tensor, const Strides& strides, int batch_idx, int64_t row,
                      int i) const {
    const int head = i / of_head;
    return tensor + SeqlenInfo::offset(strides, batch_idx, head, row) * element_bytes +
           (i - head * of_head) * kChunkBytes;
  }
};

// Numbers of sequences that are dealt out and of their tiles. Lengths are on the device and may hold
// anything, so tiles are counted up to more than there is ever room for.
struct Dealt {
  static constexpr int kMostTiles = 1 << 29;
  int sequences, tiles;

  __device__ __forceinline__ Dealt operator+(const Dealt& more) const {
    return {sequences + more.sequences, min(tiles + more.tiles, kMostTiles)};
  }
  // Of this lane and those before it.
  __device__ __forceinline__ Dealt sum_of_lanes() const {
    const int lane = threadIdx.x % 32;
    Dealt sum = *this;
    for (int distance = 1; distance < 32; distance *= 2) {
      const Dealt before = {__shfl_up_sync(~0u, sum.sequences, distance),
                            __shfl_up_sync(~0u, sum.tiles, distance)};
      if (lane >= distance) sum = sum + before;
    }
    return sum;
  }
};

// Deals out the sequences from number `first` on, `count` of them, in their order. One thread block,
// a thread for each of kDealThreads sequences at a time. rows_of(seqlen): how many rows of a
// sequence are to be dealt out, in tiles that are listed. visit(seqlen, number, place): of each that
// has rows, with its place among them. Returns how many these are.
template <typename RowsOf, typename Visit>
__device__ __forceinline__ int deal(const FwdParams& params, int first, int count,
                                    const TileList& list, const RowsOf& rows_of,
                                    const Visit& visit) {
  constexpr int kWarps = kDealThreads / 32;
  __shared__ Dealt of_warps[2][kWarps];
  const int thread = threadIdx.x, warp = thread / 32;
  Dealt total = {};
  int turn = 0;
  for (int base = 0; base < count; base += kDealThreads, turn ^= 1) {
    const int batch_idx = first + min(base + thread, count - 1);
    const SeqlenInfo seqlen(params, batch_idx);
    const int rows = base + thread < count ? rows_of(seqlen) : 0;
    const int tiles = rows > 0 ? (rows - 1) / list.queries_of_tile + 1 : 0;
    const Dealt of_lanes = Dealt{rows > 0, tiles}.sum_of_lanes();
    if (thread % 32 == 31) of_warps[turn][warp] = of_lanes;
    __syncthreads();
    Dealt up_to_this = total + of_lanes;
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) up_to_this = up_to_this + of_warps[turn][i];
      total = total + of_warps[turn][i];
    }
    if (rows == 0) continue;
    visit(seqlen, batch_idx, up_to_this.sequences - 1);
    const int first_tile = up_to_this.tiles - tiles;
    for (int i = 0; i < tiles && first_tile + i < list.most_tiles; ++i) {
      list.tiles[first_tile + i] = {.q_begin = static_cast<int>(seqlen.q_begin),
                                    .len_q = seqlen.len_q,
                                    .k_begin = static_cast<int>(seqlen.k_begin),
                                    .len_k = seqlen.len_k,
                                    .block = tiles - 1 - i,
                                    .row = batch_idx,
                                    .segment_q = rows};
    }
  }
  if (thread == 0) {
    *list.num_tiles = min(total.tiles, list.most_tiles);
    *list.tile_counter = 0;
  }
  return total.sequences;
}

__global__ void __launch_bounds__(kDealThreads)
    deal_long_kernel(const __grid_constant__ FwdParams params, int tokens, LongSequences to) {
  ptx::launch_dependents();
  const auto rows_of = [&](const SeqlenInfo& seqlen) {
    return seqlen.len_q > tokens ? seqlen.len_q : 0;
  };
  const auto visit = [&](const SeqlenInfo& seqlen, int batch_idx, int place) {
    const auto leftpad = static_cast<int>(seqlen.k_begin - seqlen.segment_k_begin);
    to.cu_seqlens_q[place] = static_cast<int>(seqlen.q_begin);
    to.cu_seqlens_k[place] = static_cast<int>(seqlen.segment_k_begin);
    to.seqused_q[place] = seqlen.len_q;
    to.seqused_k[place] = leftpad + seqlen.len_k;
    to.leftpad_k[place] = leftpad;
    to.row[place] = batch_idx;
  };
  const int sequences = deal(params, 0, params.batch, to.list, rows_of, visit);
  for (int place = sequences + threadIdx.x; place <= params.batch; place += kDealThreads) {
    to.cu_seqlens_q[place] = static_cast<int>(params.total_q);
    to.cu_seqlens_k[place] = static_cast<int>(params.total_k);
    if (place == params.batch) break;
    to.seqused_q[place] = to.seqused_k[place] = to.leftpad_k[place] = to.row[place] = 0;
  }
}

__global__ void __launch_bounds__(kDealThreads)
    list_tiles_kernel(const __grid_constant__ FwdParams params, TileList to) {
  ptx::launch_dependents();
  deal(
      params, -1, params.batch + 2, to, [](const SeqlenInfo& seqlen) { return seqlen.segment_q; },
      [](const SeqlenInfo&, int, int) {});
}

// A thread block fills one place of a sequence's row of queries.
__global__ void __launch_bounds__(kThreads)
    gather_queries_kernel(const __grid_constant__ FwdParams params, EvenQueries even) {
  ptx::wait_for_prerequisites();
  // Thread blocks of decode that come early would keep those of the kernel for the long sequences,
  // which is to run beside it, from a multiprocessor of their own.
  if (!even.leaves_long) ptx::launch_dependents();
  const int place = blockIdx.x, batch_idx = blockIdx.y;
  const SeqlenInfo seqlen(params, batch_idx);
  const int query = place - even.tokens + seqlen.len_q;
  const HeadChunks chunks(params, params.head_dim);
  auto* const to =
      static_cast<uint4*>(even.q) + (int64_t{batch_idx} * even.tokens + place) * chunks.of_row;
  for (int i = threadIdx.x; i < chunks.of_row; i += kThreads) {
    uint4 chunk = {};
    if (query >= 0) {
      chunk = *reinterpret_cast<const uint4*>(chunks.at(static_cast<const char*>(params.q),
                                                        params.q_strides, batch_idx,
                                                        seqlen.q_begin + query, i));
    }
    to[i] = chunk;
  }
  if (place == 0 && threadIdx.x == 0) {
    const bool is_left = even.leaves_long && seqlen.len_q > even.tokens;
    even.first[batch_idx] = static_cast<int>(seqlen.k_begin);
    even.end[batch_idx] = static_cast<int>(seqlen.k_begin + (is_left ? 0 : seqlen.len_k));
  }
}

// A row of thread blocks writes a sequence's rows, or of one that is left to another kernel those
// that do not count. The first and the last of them write what lies outside all sequences.
__global__ void __launch_bounds__(kThreads)
    scatter_results_kernel(const __grid_constant__ FwdParams params, EvenResults even) {
  ptx::wait_for_prerequisites();
  const int batch_idx = static_cast<int>(blockIdx.y) - 1;
  const SeqlenInfo seqlen(params, batch_idx);
  const bool is_left = even.leaves_long && seqlen.len_q > even.tokens;
  const int first_row = is_left ? seqlen.len_q : 0;
  const HeadChunks chunks(params, params.head_dim_v);
  for (int row = first_row + blockIdx.x; row < seqlen.segment_q; row += gridDim.x) {
    const bool counts = row < seqlen.len_q;
    const int place = row - seqlen.len_q + even.tokens;
    const bool has_result = counts && place >= 0;
    const auto* const from = static_cast<const uint4*>(even.out) +
                             (int64_t{batch_idx} * even.tokens + place) * chunks.of_row;
    for (int i = threadIdx.x; i < chunks.of_row; i += kThreads) {
      const uint32_t bits = counts ? ~0u : 0;  // NaN, or 0
      const uint4 chunk = has_result ? from[i] : uint4{bits, bits, bits, bits};
      *reinterpret_cast<uint4*>(chunks.at(static_cast<char*>(params.out), params.out_strides,
                                          batch_idx, seqlen.q_begin + row, i)) = chunk;
    }
    for (int head = threadIdx.x; head < params.heads_q; head += kThreads) {
      const int64_t lse_row = int64_t{batch_idx} * params.heads_q + head;
      const float lse = has_result ? even.lse[lse_row * even.tokens + place]
                        : counts   ? NAN
                                   : -INFINITY;
      params.lse[batch_idx * params.lse_batch_stride + head * params.lse_head_stride +
                 seqlen.q_begin + row] = lse;
    }
  }
}

}  // namespace

void run_deal_long(const FwdParams& params, int tokens, const LongSequences& to, Stream stream) {
  launch<deal_long_kernel>(1, kDealThreads, 0, stream, params, tokens, to);
}

void run_list_tiles(const FwdParams& params, const TileList& to, Stream stream) {
  launch<list_tiles_kernel>(1, kDealThreads, 0, stream, params, to);
}

void run_gather_queries(const FwdParams& params, const EvenQueries& even, Stream stream) {
  const dim3 grid(even.tokens, params.batch);
  launch_overlapping<gather_queries_kernel>(grid, kThreads, 0, true, stream, params, even);
}

void run_scatter_results(const FwdParams& params, const EvenResults& even, Stream stream) {
  // Rows beyond those that count are written, too, and there may be many of them.
  constexpr int64_t kMostBlocks = 64;
  const int64_t sequences = int64_t{params.batch} + 2;
  const int64_t rows = std::min((params.total_q + sequences - 1) / sequences, kMostBlocks);
  const dim3 grid(static_cast<unsigned>(std::max<int64_t>(even.tokens, rows)),
                  static_cast<unsigned>(sequences));
  launch_overlapping<scatter_results_kernel>(grid, kThreads, 0, true, stream, params, even);
}

}  // namespace flash_attn::cuda
