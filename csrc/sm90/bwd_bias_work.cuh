// What the warps of the kernel for a shared bias's gradient (bwd_bias.cuh) tell each other: tiles
// and visits.
#pragma once

#include "../cuda/attn/block_range.cuh"
#include "../cuda/attn/score_policy.cuh"

namespace flash_attn::sm90 {

// Some elements of the gradient, and who reads them.
struct BiasTile {
  int first_row, first_key;
  int batch_begin, batch_end, head_begin, head_end;

  static constexpr int kRows = 128, kKeys = 128;

  __host__ __device__ static int64_t count(const BwdParams& params) {
    const BiasGradientParams& gradient = params.dbias;
    return int64_t{row_blocks(gradient)} * key_blocks(gradient) *
           (gradient.batch_stride == 0 ? 1 : params.batch) * entry_heads(params);
  }
  // Rows are counted from the block of keys on. Along rows, the steps in which a thread block takes
  // its tiles would keep the distance from the diagonal, and a causal mask would leave it with all
  // of them or with none.
  __device__ __forceinline__ static BiasTile make(const BwdParams& params, int number) {
    const BiasGradientParams& gradient = params.dbias;
    const int n = number % key_blocks(gradient), diagonal = number / key_blocks(gradient);
    const int entry = diagonal / row_blocks(gradient);
    const int batch = entry / entry_heads(params), head = entry % entry_heads(params);
    return {.first_row = static_cast<int>((int64_t{diagonal} + n) % row_blocks(gradient)) * kRows,
            .first_key = n * kKeys,
            .batch_begin = batch,
            .batch_end = gradient.batch_stride == 0 ? params.batch : batch + 1,
            .head_begin = head,
            .head_end = gradient.head_stride == 0 ? params.heads_q : head + 1};
  }

 private:
  __host__ __device__ static int row_blocks(const BiasGradientParams& gradient) {
    return (gradient.rows + kRows - 1) / kRows;
  }
  __host__ __device__ static int key_blocks(const BiasGradientParams& gradient) {
    return (gradient.keys + kKeys - 1) / kKeys;
  }
  __host__ __device__ static int entry_heads(const BwdParams& params) {
    return params.dbias.head_stride == 0 ? 1 : params.heads_q;
  }
};

// Where the sums of the sequences and heads that read a tile lie in the gradient.
template <typename Element>
__device__ __forceinline__ Element* gradient_of(const BwdParams& params, const BiasTile& tile) {
  const BiasGradientParams& gradient = params.dbias;
  return static_cast<Element*>(gradient.data) + tile.batch_begin * gradient.batch_stride +
         tile.head_begin * gradient.head_stride;
}

// What a producer warp tells the consumers. Beside Q and dO, it tells of one pair that reads a
// tile's elements; beside a bias, that a tile ends and the next one begins.
struct BiasVisit {
  using ScorePolicy = TermScores<ScoreTerms{.alibi = true, .bias = true}>;

  bool is_pair;
  bool masked;                  // some of the pair's scores are
  int num_halves;               // of keys
  bool ends_tile, begins_tile;  // one that ends is `tile`, one that begins is `next`
  BiasTile tile, next;
  AttentionWindow window;
  float lse_log2[BiasTile::kRows], delta[BiasTile::kRows];
  alignas(ScorePolicy) unsigned char score_storage[sizeof(ScorePolicy)];

  __device__ __forceinline__ const ScorePolicy& score() const {
    return *reinterpret_cast<const ScorePolicy*>(score_storage);
  }
};

}  // namespace flash_attn::sm90
