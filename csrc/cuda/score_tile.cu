#include "score_tile.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "../core/score_range.h"
#include "attn/dropout.cuh"
#include "launch.h"
#include "tensor_part.cuh"

namespace flash_attn::cuda {
namespace {

constexpr int kThreads = 128, kWarpThreads = 32;
constexpr int kWarpKeys = 512;  // the most of a row that one warp has
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;
template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();
template <typename T>
constexpr T kLowest = std::numeric_limits<T>::lowest();

// Sums and maxima over the threads of a row: a warp, or the whole block.
template <int kRowThreads, typename T, typename Join>
__device__ T join_row(T value, const Join& join) {
  value = join_warp(value, join);
  if constexpr (kRowThreads > kWarpThreads) {
    constexpr int kWarps = kRowThreads / kWarpThreads;
    __shared__ T of_warp[kWarps];
    __syncthreads();  // what the last call left has been read
    if (threadIdx.x % kWarpThreads == 0) of_warp[threadIdx.x / kWarpThreads] = value;
    __syncthreads();
    value = of_warp[0];
    for (int warp = 1; warp < kWarps; ++warp) value = join(value, of_warp[warp]);
  }
  return value;
}
template <int kRowThreads, typename T>
__device__ T row_largest(T value) {
  return join_row<kRowThreads>(value, [](T a, T b) { return max(a, b); });
}
// The larger one, or NaN where either is NaN, as max() would leave it out.
template <typename T>
__device__ T larger_or_nan(T a, T b) {
  return a > b || isnan(a) ? a : b;
}
template <int kRowThreads, typename T>
__device__ T row_total(T value) {
  return join_row<kRowThreads>(value, [](T a, T b) { return a + b; });
}

// One row of a tile. kTerms: the call has more than a scale and a band.
template <typename T, bool kTerms>
class ScoreRow {
 public:
  __device__ ScoreRow(const ScoreTile& tile, const TileRow& row) : tile_(tile), row_(row) {
    const int64_t offset = tile.offsets == nullptr ? tile.offset : tile.offsets[row.batch_idx];
    diagonal_ = row.query + offset - tile.first_key;
    const bool exists =
        tile.query_exists.data == nullptr || row.of<const uint8_t>(tile.query_exists) != 0;
    const int64_t keys = exists ? tile.keys : 0;
    first_ = static_cast<int>(max(min(diagonal_ - tile.left, keys), int64_t{0}));
    last_ = static_cast<int>(max(min(diagonal_ + tile.right + 1, keys), int64_t{first_}));
    if (kTerms && tile.slopes.data != nullptr) slope_ = row.of<const float>(tile.slopes);
    if (kTerms && tile.dropout.rng_state != nullptr) {
      dropout_ = DropoutHead::of(tile.dropout, int64_t{row.batch_idx} * tile.heads_q + row.head);
      pair_word_ = dropout_.query_word(static_cast<int>(row.query / 16 * 8 + row.query % 8));
      keep_scale_ = 1 / static_cast<T>(tile.dropout.keep);
    }
  }

  // Keys outside the band are hidden.
  __device__ bool in_band(int key) const { return first_ <= key && key < last_; }

  struct Score {
    T s;         // in units of log 2; -inf: hidden
    T tanh = 0;  // tanh(S / softcap)
  };
  // Of a key of the band.
  __device__ Score score(T product, int key) const {
    Score score = {product * static_cast<T>(tile_.scale)};
    if constexpr (kTerms) {
      if (tile_.softcap != 0) {
        score.tanh = tanh(score.s);
        score.s = score.tanh * static_cast<T>(tile_.softcap * kLog2E);
      }
      bool hidden = tile_.key_exists.data != nullptr &&
                    row_.of<const uint8_t>(tile_.key_exists, tile_.first_key + key) == 0;
      if (tile_.bias.data != nullptr) hidden |= add_bias(score.s, key);
      if (tile_.slopes.data != nullptr) {
        const int64_t distance = key - diagonal_;
        const T steps = static_cast<T>(distance < 0 ? -distance : distance);
        score.s -= static_cast<T>(slope_) * steps * static_cast<T>(kLog2E);
      }
      if (hidden) score.s = -kInfinity<T>;
    }
    return score;
  }
  // Whether the largest softmax_scale · q·k counts a key that is seen, and its number.
  __device__ bool counts(const Score& score) const {
    return tile_.bounded ? score.s >= static_cast<T>(-kMaxScore * kLog2E) : score.s > -kInfinity<T>;
  }
  __device__ T logit(T product) const {
    return product * static_cast<T>(tile_.scale * (tile_.softcap != 0 ? tile_.softcap : kLn2));
  }

  // step(key, load(key), dropped) for the keys of a thread, of kRowThreads that have the row. What
  // is loaded of four keys is asked for at once. Of bounded scores they share a word of dropout,
  // whether there is any or not: so dropout leaves LSE its bits. Else neighbours have neighbouring
  // keys.
  template <int kRowThreads, typename Load, typename Step>
  __device__ void for_each_key(int thread, const Load& load, const Step& step) const {
    const bool drops = kTerms && tile_.dropout.rng_state != nullptr;
    const auto first_four = static_cast<int>(tile_.first_key / 4);
    const int within = kTerms && tile_.bounded ? 8 : 32;
    for (int four = thread; four / within * within * 4 < tile_.keys; four += kRowThreads) {
      const int first = four / within * within * 4 + four % within;
      decltype(load(0)) loaded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + i * within;
        if (key < tile_.keys) loaded[i] = load(key);
      }
      const uint32_t word = drops ? dropout_word(first_four + four) : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + i * within;
        if (key < tile_.keys) step(key, loaded[i], drops && is_dropped(word, i));
      }
    }
  }

  // x as a factor of the keep-mask leaves it.
  __device__ T dropout(T x, bool dropped) const {
    if (!kTerms) return x;
    return dropped ? x * 0 : x * keep_scale_;
  }

 private:
  // Whether the bias hides the key.
  __device__ bool add_bias(T& s, int key) const {
    const TensorPart& bias = tile_.bias;
    const int64_t at = place_in(bias, row_.batch_idx, row_.head, row_.query, tile_.first_key + key);
    if (bias.dtype == DType::kBool) return static_cast<const uint8_t*>(bias.data)[at] == 0;
    const T number = load_number<T>(bias, at);
    // The smaller one, or NaN.
    const T limited = number > static_cast<T>(kMaxScore) ? static_cast<T>(kMaxScore) : number;
    s += limited * static_cast<T>(kLog2E);
    return number < static_cast<T>(-kMaxScore);
  }

  __device__ uint32_t dropout_word(int four) const {
    uint32_t words[2];
    mix_dropout_words(words, pair_word_, dropout_.key_word(four), dropout_.words.last);
    return words[row_.query / 8 % 2];
  }
  __device__ bool is_dropped(uint32_t word, int byte) const {
    const uint32_t number = (word >> 8 * byte & 127) * 2 + (word >> (8 * (byte ^ 1) + 7) & 1);
    const bool reaches = number << 7 >= (tile_.dropout.bound & 0xffff);
    return reaches == (tile_.dropout.mirror != 0);
  }

  const ScoreTile& tile_;
  const TileRow& row_;
  int64_t diagonal_;  // the key on it, as the tile counts keys
  int first_, last_;  // the keys of the band
  float slope_ = 0;
  DropoutHead dropout_ = {};
  uint32_t pair_word_ = 0;
  T keep_scale_ = 1;
};

template <typename T>
__device__ T lowest_score(bool bounded) {
  return bounded ? static_cast<T>(-kMaxScore * kLog2E) : kLowest<T>;
}

// A sink in units of log 2, in the range of core/score_range.h.
template <typename T>
__device__ T sink_logit(T sink) {
  if (sink < static_cast<T>(-kMaxSink)) return -kInfinity<T>;
  return (sink > static_cast<T>(kMaxSink) ? static_cast<T>(kMaxSink) : sink) *
         static_cast<T>(kLog2E);
}

// Thread blocks that share a multiprocessor. The compiler would aim for more of fp64, and spill.
template <typename T>
constexpr int kBlocks = sizeof(T) == sizeof(double) ? 7 : 9;

}  // namespace

// kRowThreads threads have a row. A thread finds the scores of its own keys alone in shared memory.
// kProbabilities: step.score_max is there.
template <typename T, typename Element, int kRowThreads, bool kTerms, bool kProbabilities>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    softmax_step_kernel(const __grid_constant__ ScoreTile tile,
                        const __grid_constant__ SoftmaxStep step) {
  extern __shared__ __align__(16) char smem_bytes[];
  constexpr int kRows = kThreads / kRowThreads;
  const int row_of_block = threadIdx.x / kRowThreads, thread = threadIdx.x % kRowThreads;
  const int index = blockIdx.x * kRows + row_of_block;
  if (index >= tile.count_rows()) return;
  const TileRow place(tile, index);
  const ScoreRow<T, kTerms> row(tile, place);
  T* const s = reinterpret_cast<T*>(smem_bytes) + row_of_block * tile.keys;

  const auto sink = [&] {
    if (!step.first || step.sink == nullptr) return -kInfinity<T>;
    return sink_logit(static_cast<const T*>(step.sink)[place.head]);
  };
  const T lowest = lowest_score<T>(tile.bounded);
  const T m = step.first ? max(lowest, sink()) : static_cast<const T*>(step.row_max)[index];

  T score_max = lowest;
  if (kProbabilities && !step.first) score_max = static_cast<const T*>(step.score_max)[index];

  // S, and m' = max(m, rowmax S)
  const T* const products = static_cast<const T*>(step.products) + int64_t{index} * tile.keys;
  T largest = m, logit = -kInfinity<T>;
  const auto product_of = [&](int key) { return products[key]; };
  row.template for_each_key<kRowThreads>(thread, product_of, [&](int key, T product, bool) {
    if (!row.in_band(key)) return;
    const auto score = row.score(product, key);
    s[key] = score.s;
    largest = max(largest, score.s);
    if (kProbabilities) score_max = larger_or_nan(score_max, score.s);
    if (step.max_logits != nullptr && row.counts(score)) logit = max(logit, row.logit(product));
  });
  const T new_max = row_largest<kRowThreads>(largest);
  if (kProbabilities) score_max = join_row<kRowThreads>(score_max, larger_or_nan<T>);

  // P = exp(S - m'), l = exp(m - m') l + rowsum P, and dropout(P). Where probabilities are wanted,
  // exp(S - rowmax S) comes first, and P is less by one factor where a sink lies above the scores.
  T sum = 0;
  const T base = kProbabilities ? score_max : new_max;
  const T of_base = kProbabilities ? exp2(score_max - new_max) : 1;
  auto* const p = static_cast<Element*>(step.p) + int64_t{index} * tile.keys;
  auto* const probabilities = kProbabilities && step.probabilities.data != nullptr
                                  ? &place.of<Element>(step.probabilities, tile.first_key)
                                  : nullptr;
  const auto score_of = [&](int key) { return row.in_band(key) ? s[key] : -kInfinity<T>; };
  const auto is_seen = [&](int key, T score) {
    return row.in_band(key) && (!kTerms || score != -kInfinity<T>);
  };
  row.template for_each_key<kRowThreads>(thread, score_of, [&](int key, T score, bool dropped) {
    T kept = static_cast<T>(-0.0), of_largest = 0;
    if (is_seen(key, score)) {
      of_largest = exp2(score - base);
      const T probability = of_largest * of_base;
      sum += probability;
      kept = row.dropout(probability, dropped);
    }
    p[key] = static_cast<Element>(kept);
    if (probabilities != nullptr) {
      probabilities[key * step.probabilities.col] =
          static_cast<Element>(dropped ? -of_largest : of_largest);
    }
  });
  sum = row_total<kRowThreads>(sum);

  if (step.max_logits != nullptr) logit = row_largest<kRowThreads>(logit);
  if (thread != 0) return;
  const T l = step.first ? exp2(sink() - m) : static_cast<const T*>(step.row_sum)[index];
  const T rescale = exp2(m - new_max);
  static_cast<T*>(step.row_max)[index] = new_max;
  static_cast<T*>(step.row_sum)[index] = rescale * l + sum;
  static_cast<T*>(step.rescale)[index] = rescale;
  if (step.max_logits != nullptr) static_cast<T*>(step.max_logits)[index] = logit;
  if (kProbabilities) static_cast<T*>(step.score_max)[index] = score_max;
}

namespace {

// What the backward keeps of a row's LSE: +inf where the row gives no gradient, so that P = 0.
template <typename T>
__device__ T lse_log2(T lse) {
  const double limit = sizeof(T) == sizeof(double) ? kMaxLseFp64 : kMaxLse;
  return fabs(lse) > static_cast<T>(limit) ? kInfinity<T> : lse * static_cast<T>(kLog2E);
}

template <typename T, typename Element, bool kTerms>
__global__ void __launch_bounds__(kThreads)
    gradient_step_kernel(const __grid_constant__ ScoreTile tile,
                         const __grid_constant__ GradientStep step) {
  const int index = blockIdx.x;
  const TileRow place(tile, index);
  const ScoreRow<T, kTerms> row(tile, place);
  const T lse = lse_log2(place.of<const T>(step.lse)), delta = place.of<const T>(step.delta);
  const int64_t first = int64_t{index} * tile.keys;
  const T* const products = static_cast<const T*>(step.products) + first;
  const T* const value_products = static_cast<const T*>(step.value_products) + first;
  struct Products {
    T of_keys, of_values;
  };
  const auto load = [&](int key) { return Products{products[key], value_products[key]}; };
  row.template for_each_key<kThreads>(
      threadIdx.x, load, [&](int key, Products product, bool dropped) {
        T kept = static_cast<T>(-0.0), ds = 0, dbias = 0;
        if (row.in_band(key)) {
          const auto score = row.score(product.of_keys, key);
          if (!kTerms || score.s != -kInfinity<T>) {
            const T p = exp2(score.s - lse);
            kept = row.dropout(p, dropped);
            dbias = ds = p * (row.dropout(product.of_values, dropped) - delta);
            if (kTerms && tile.softcap != 0) ds *= 1 - score.tanh * score.tanh;
          }
        }
        static_cast<Element*>(step.p)[first + key] = static_cast<Element>(kept);
        static_cast<Element*>(step.ds)[first + key] = static_cast<Element>(ds);
        if (step.dbias != nullptr) static_cast<T*>(step.dbias)[first + key] = dbias;
      });
}

template <typename T, typename Element>
__global__ void __launch_bounds__(kThreads)
    probabilities_kernel(const __grid_constant__ ScoreTile tile, const T* products,
                         const T* score_max, const __grid_constant__ TensorPart probabilities) {
  const int index = blockIdx.x;
  const TileRow place(tile, index);
  const ScoreRow<T, true> row(tile, place);
  const T largest = score_max[index];
  const auto load = [&](int key) { return products[int64_t{index} * tile.keys + key]; };
  row.template for_each_key<kThreads>(threadIdx.x, load, [&](int key, T product, bool dropped) {
    const T score = row.in_band(key) ? row.score(product, key).s : -kInfinity<T>;
    const T p = score == -kInfinity<T> ? 0 : exp2(score - largest);
    place.of<Element>(probabilities, tile.first_key + key) = static_cast<Element>(dropped ? -p : p);
  });
}

template <typename T, typename Element>
__global__ void __launch_bounds__(kThreads)
    finish_rows_kernel(const __grid_constant__ ScoreTile tile,
                       const __grid_constant__ RowResults results) {
  const int index = blockIdx.x * (kThreads / kWarpThreads) + threadIdx.x / kWarpThreads;
  if (index >= tile.count_rows()) return;
  const int lane = threadIdx.x % kWarpThreads;
  const TileRow place(tile, index);
  const T l = static_cast<const T*>(results.row_sum)[index];
  const T* const o = static_cast<const T*>(results.o) + int64_t{index} * results.head_dim_v;
  for (int col = lane; col < results.head_dim_v; col += kWarpThreads) {
    place.of<Element>(results.out, col) = static_cast<Element>(l == 0 ? o[col] : o[col] / l);
  }
  if (lane == 0) {
    const T m = static_cast<const T*>(results.row_max)[index];
    place.of<T>(results.lse) = (m + log2(l)) * static_cast<T>(kLn2);
  }
}

// Calls f.template operator()<T, Element, kTerms>().
template <typename F>
void with_instance(const ScoreTile& tile, F&& f) {
  const bool terms = tile.softcap != 0 || tile.key_exists.data != nullptr ||
                     tile.bias.data != nullptr || tile.slopes.data != nullptr ||
                     tile.dropout.rng_state != nullptr;
  with_types(tile.scores, tile.operands, [&]<typename T, typename Element>() {
    terms ? f.template operator()<T, Element, true>() : f.template operator()<T, Element, false>();
  });
}

template <typename T, typename Element, bool kTerms, bool kProbabilities>
void launch_softmax_step(const ScoreTile& tile, const SoftmaxStep& step, Stream stream) {
  const bool by_warps = tile.keys <= kWarpKeys;
  const int rows = by_warps ? kThreads / kWarpThreads : 1;
  const int smem_bytes = rows * tile.keys * static_cast<int>(sizeof(T));
  const dim3 grid = blocks_of(tile.count_rows(), rows);
  static_assert(kScoreTileKeys * sizeof(double) < 48 * 1024, "needs no leave of the driver");
  if (by_warps) {
    launch<softmax_step_kernel<T, Element, kWarpThreads, kTerms, kProbabilities>>(
        grid, kThreads, smem_bytes, stream, tile, step);
  } else {
    launch<softmax_step_kernel<T, Element, kThreads, kTerms, kProbabilities>>(
        grid, kThreads, smem_bytes, stream, tile, step);
  }
}

}  // namespace

void run_softmax_step(const ScoreTile& tile, const SoftmaxStep& step, Stream stream) {
  if (step.score_max != nullptr) {
    with_types(tile.scores, tile.operands, [&]<typename T, typename Element>() {
      launch_softmax_step<T, Element, true, true>(tile, step, stream);
    });
    return;
  }
  with_instance(tile, [&]<typename T, typename Element, bool kTerms>() {
    launch_softmax_step<T, Element, kTerms, false>(tile, step, stream);
  });
}

void run_gradient_step(const ScoreTile& tile, const GradientStep& step, Stream stream) {
  with_instance(tile, [&]<typename T, typename Element, bool kTerms>() {
    launch<gradient_step_kernel<T, Element, kTerms>>(blocks_of(tile.count_rows(), 1), kThreads, 0,
                                                     stream, tile, step);
  });
}

void run_probabilities(const ScoreTile& tile, const void* products, const void* score_max,
                       const TensorPart& probabilities, Stream stream) {
  with_types(tile.scores, tile.operands, [&]<typename T, typename Element>() {
    launch<probabilities_kernel<T, Element>>(blocks_of(tile.count_rows(), 1), kThreads, 0, stream,
                                             tile, static_cast<const T*>(products),
                                             static_cast<const T*>(score_max), probabilities);
  });
}

void run_finish_rows(const ScoreTile& tile, const RowResults& results, Stream stream) {
  with_types(tile.scores, results.out.dtype, [&]<typename T, typename Element>() {
    launch<finish_rows_kernel<T, Element>>(blocks_of(tile.count_rows(), kThreads / kWarpThreads),
                                           kThreads, 0, stream, tile, results);
  });
}

}  // namespace flash_attn::cuda
