// Q Kᵀ and dO Vᵀ of one block of queries in bwd.cuh, the mask, and which blocks it leaves.
#pragma once

#include "../cuda/attn/mask.cuh"
#include "../cuda/attn/tile_mask.cuh"
#include "../cuda/ptx/barrier.cuh"
#include "../cuda/tile/gemm.cuh"
#include "../cuda/tile/warp_grid.cuh"
#include "bwd_dq_reduction.cuh"

namespace flash_attn::sm80 {

// Sums of products on their way to the warps that own them; nothing where each warp computes its
// own.
template <typename Traits>
struct SplitScoreSums {};
template <typename Traits>
  requires(Traits::kDepthWarps > 1)
struct SplitScoreSums<Traits> {
  float4 sums[Traits::kThreads / 32][Traits::kDepthWarps - 1][2][32];
};

// Computes A Bᵀ for this warp's part of the scores.
template <typename Traits>
__device__ __forceinline__ void multiply_rows(typename Traits::ScoreGrid::Part& S,
                                              const SplitScoreSums<Traits>&,
                                              const typename Traits::QTile& A,
                                              const typename Traits::KTile& B, int warp, int lane) {
  using Grid = typename Traits::ScoreGrid;
  gemm_smem<typename Traits::Element, Traits::kHeadDim, Into::kZero>(
      S,
      SmemOperandA<Grid::Part::kMBlocks, 16, Layout::kKInner, typename Traits::QTile>(
          A, warp / Grid::kGridCols * Grid::kWarpRows, lane),
      SmemOperandB<typename Traits::KTile, Layout::kKInner>(
          B, warp % Grid::kGridCols * Grid::kWarpCols, lane));
}

// The same where parts are 16 × 16: fragments that small would each be read for 16 others. Four
// warps share 32 × 32 scores, a quarter of the head dim each, and then deal out the sums. Twice in
// a row only with a barrier of the thread block in between.
template <typename Traits>
  requires(Traits::kDepthWarps > 1)
__device__ __forceinline__ void multiply_rows(typename Traits::ScoreGrid::Part& S,
                                              SplitScoreSums<Traits>& exchange,
                                              const typename Traits::QTile& A,
                                              const typename Traits::KTile& B, int warp, int lane) {
  using Element = typename Traits::Element;
  constexpr int kDepthWarps = Traits::kDepthWarps, kDepth = Traits::kHeadDim / kDepthWarps;
  static_assert(kDepthWarps == 4 && Traits::ScoreGrid::kGridCols == 2 && Traits::kBlockN == 32);
  static_assert(Traits::ScoreGrid::kWarpRows == 16 && kDepth % Traits::QTile::kSlabCols == 0);
  // Slabs lie one behind the other: some neighbouring ones are a tile.
  using ATile = SmemTile<Element, Traits::kBlockM, kDepth>;
  using BTile = SmemTile<Element, Traits::kBlockN, kDepth>;
  const int depth = warp % kDepthWarps, group = warp / kDepthWarps;
  Accumulator<2, 32> partial;
  gemm_smem<Element, kDepth, Into::kZero>(
      partial,
      SmemOperandA<2, 16, Layout::kKInner, ATile>(reinterpret_cast<const ATile*>(&A)[depth],
                                                  group * 32, lane),
      SmemOperandB<BTile, Layout::kKInner>(reinterpret_cast<const BTile*>(&B)[depth], 0, lane));
  // Quarter q, rows 16 · (q / 2) and keys 16 · (q % 2), is of warp q.
  const auto place = [&](int from, int to) -> float4(&)[2][32] {
    return exchange.sums[group * kDepthWarps + from][to - (to > from ? 1 : 0)];
  };
#pragma unroll
  for (int q = 0; q < kDepthWarps; ++q) {
    float4(&to)[2][32] = place(depth, q);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float (&sum)[4] = partial.data[q / 2][q % 2 * 2 + n];
      if (q != depth) {
        to[n][lane] = {sum[0], sum[1], sum[2], sum[3]};
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) S.data[0][n][i] = sum[i];
      }
    }
  }
  ptx::barrier_sync<32 * kDepthWarps>(1 + group);
#pragma unroll
  for (int step = 1; step < kDepthWarps; ++step) {
    const float4(&from)[2][32] = place((depth + step) % kDepthWarps, depth);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float4 sum = from[n][lane];
      S.data[0][n][0] += sum.x;
      S.data[0][n][1] += sum.y;
      S.data[0][n][2] += sum.z;
      S.data[0][n][3] += sum.w;
    }
  }
}

// The policy of a query head: in shared memory, of this head and the next one by turns. With a mask
// that may hide heads there are no turns, and it is made where it is needed.
template <typename Traits>
__device__ __forceinline__ decltype(auto) score_of(const typename Traits::Params& params,
                                                   const typename Traits::SharedStorage& smem,
                                                   int head) {
  if constexpr (kSkipsTiles<typename Traits::ScorePolicy>) {
    // Anew each time: its members would take registers from one use to the next.
    return MaskedScores(params, smem.keys.batch_idx, static_cast<int>(ptx::opaque(head)), 0);
  } else {
    return (smem.score[head % 2]);
  }
}

// Sets the scores that attention does not see to -inf.
template <typename Traits>
__device__ __forceinline__ void mask_scores(typename Traits::ScoreGrid::Part& S,
                                            const typename Traits::Params& params,
                                            const typename Traits::SharedStorage& smem,
                                            const BwdQueryBlock& block) {
  using Grid = typename Traits::ScoreGrid;
  const Grid grid;
  const int lane = threadIdx.x % 32;
  const AttentionWindow window(params, smem.seqlen.len_q, smem.seqlen.len_k);
  int query[Grid::Part::kRows];
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
    query[row] =
        block.first_row + grid.row * Grid::kWarpRows + row / 2 * 16 + fragment_row(row, lane);
  }
  const int first_key = smem.keys.first_key + grid.col * Grid::kWarpCols;
  mask_keys(S, window, query, first_key, lane);
  if constexpr (kSkipsTiles<typename Traits::ScorePolicy>) {
    const ScorePlace place = {block.first_row + grid.row * Grid::kWarpRows, first_key};
    score_of<Traits>(params, smem, block.head).mask(S, place, lane);
  }
}

// Waits until what was started lies in shared memory, which is about to be written otherwise.
__device__ __forceinline__ void drain_loads() {
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

// Returns the first block of queries from `block` on, with those of the next heads behind them,
// that the mask does not hide from the keys. If its head is end_head, there is none.
template <typename Traits>
__device__ __forceinline__ BwdQueryBlock
seen_query_block(const typename Traits::Params& params, const typename Traits::SharedStorage& smem,
                 BwdQueryBlock block, int end_head) {
  if constexpr (kSkipsTiles<typename Traits::ScorePolicy>) {
    constexpr int kBlockM = Traits::kBlockM;
    const BlockRange range = smem.range;
    for (; block.head < end_head; block = {block.head + 1, range.begin * kBlockM}) {
      const MaskedScores score(params, smem.keys.batch_idx, block.head, 0);
      const int m = score.first_query_block<kBlockM, Traits::kBlockN>(
          smem.keys.first_key, block.first_row / kBlockM, range.end);
      if (m < range.end) return {block.head, m * kBlockM};
    }
  }
  return block;
}

}  // namespace flash_attn::sm80
