// dQ of one block of queries, on its way from the registers of bwd.cuh's kernel into dq_accum.
#pragma once

#include "../cuda/attn/dq_accum.cuh"
#include "../cuda/ptx/red.cuh"
#include "../cuda/tile/gemm.cuh"
#include "../cuda/tile/warp_grid.cuh"

namespace flash_attn::sm80 {

// One iteration's queries.
struct BwdQueryBlock {
  int head, first_row;
};

// A block's part of dQ = dS K on its way into dq_accum, one pass over kDqPassCols columns at a
// time.
template <typename Traits>
class DqReduction {
  using Grid = typename Traits::DqGrid;
  using Part = typename Grid::Part;
  static constexpr int kReductions = Part::kMBlocks * Part::kN / 8;  // of four values a lane
#if __CUDA_ARCH__ >= 900
  static constexpr DqAccumOrder kOrder = DqAccumOrder::kByLane;
#else
  static constexpr DqAccumOrder kOrder = DqAccumOrder::kByValue;
#endif

 public:
  __device__ __forceinline__ void compute(const BwdParams& params, const BwdQueryBlock& block,
                                          const typename Traits::SharedStorage& smem, int pass) {
    const Grid grid;
    const int lane = threadIdx.x % 32, first_row = grid.row * Grid::kWarpRows;
    gemm_smem<typename Traits::Element, Traits::kBlockN, Into::kZero>(
        dQ_,
        SmemOperandA<Part::kMBlocks, 16, Layout::kKInner, typename Traits::PTile>(smem.ds,
                                                                                  first_row, lane),
        DealtColumns<Grid::kGridCols, typename Traits::KTile>(
            smem.k, grid.col + pass * (Traits::kDqPassCols / 16), lane));
    const int row = block.first_row + first_row;
    rows_left_ = smem.seqlen.len_q - row;
    const int64_t sequence_row =
        dq_accum_first_row(params, smem.seqlen.q_begin, smem.keys.batch_idx);
    accum_ = params.dq_accum +
             (block.head * params.dq_accum_rows + sequence_row + row) * Traits::kHeadDim +
             (pass * (Traits::kDqPassCols / 8) + grid.col * 2) * kDqAccumBlock +
             dq_accum_position(kOrder, lane, 0);
  }

  // Sends off the step-th of num_steps shares; both are known at compile time.
  __device__ __forceinline__ void send(int step, int num_steps) const {
#pragma unroll
    for (int i = 0; i < kReductions; ++i) {
      if (i * num_steps / kReductions == step) reduce(i / (Part::kN / 8), i % (Part::kN / 8));
    }
  }

 private:
  // Block m of 16 rows and n of 8 columns, which lie in pairs kGridCols pairs apart.
  __device__ __forceinline__ void reduce(int m, int n) const {
    // Blocks behind len_q add 0, wherever that is (dq_accum has rows behind the last): a branch
    // would keep the compiler from spreading the reductions.
    const bool exists = m * kDqAccumRows < rows_left_;
    float* const block = accum_ + m * kDqAccumRows * Traits::kHeadDim +
                         (n / 2 * 2 * Grid::kGridCols + n % 2) * kDqAccumBlock;
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = exists ? dQ_.data[m][n][i] : 0.f;
    if constexpr (kOrder == DqAccumOrder::kByLane) {
      ptx::red_add_v4(block, value[0], value[1], value[2], value[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::red_add(block + dq_accum_position(kOrder, 0, i), value[i]);
    }
  }

  Part dQ_;
  float* accum_;
  int rows_left_;  // before len_q, from this warp's first row on
};

// Pᵀ or dSᵀ as A; with spread_dq a share of the reductions goes with each step's columns.
template <typename Traits, int kFirstStep, bool kSumDq>
struct RowsAndReductions {
  using Grid = typename Traits::DkvGrid;
  static constexpr int kStep = kStepK<typename Traits::Element>, kSteps = Traits::kBlockM / kStep;
  SmemOperandA<Grid::Part::kMBlocks, 16, Layout::kKOuter, typename Traits::PTile> operand;
  const DqReduction<Traits>& dq;

  __device__ __forceinline__ RowsAndReductions(const typename Traits::PTile& tile, int lane,
                                               const DqReduction<Traits>& reduction)
      : operand(tile, Grid().row * Grid::kWarpRows, lane), dq(reduction) {}
  __device__ __forceinline__ void walk() {
    static_assert(!Traits::kTile.spread_dq);
    operand.walk();
  }
  __device__ __forceinline__ void load(uint32_t (&blocks)[Grid::Part::kMBlocks][4], int k) const {
    operand.load(blocks, k);
    if constexpr (kSumDq && Traits::kTile.spread_dq) {
      constexpr int kSendSteps = 2 * kSteps / Traits::kDqPasses;
      dq.send((kFirstStep + k / kStep) % kSendSteps, kSendSteps);
    }
  }
};

}  // namespace flash_attn::sm80
