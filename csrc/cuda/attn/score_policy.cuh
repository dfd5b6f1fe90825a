// What happens to scores between Q Kᵀ and the mask, to probabilities before P V, and to the
// gradients of both: one text for every kernel.
//
//   PlainScores     nothing (plain_scores.cuh)
//   TermScores      of softcap, bias, ALiBi and dropout those that a kernel is compiled for; which of
//                   them a call has is asked at run time, and all threads branch alike
//   GeneralScores   TermScores of all four
//
// Scores stay in the unit of Q Kᵀ, that is divided by softmax_scale, so that the softmax's one
// multiplication for each of them serves as it does without terms:
//
//   X = Q Kᵀ → cap · tanh(X / cap), cap = softcap / softmax_scale
//     → + bias / softmax_scale - slope / softmax_scale · |key - diagonal|
//
// Dropout keeps m ∈ {0, 1} of P and divides by the keep probability 1 / ρ. The kernels leave ρ out
// of their loops and multiply what they store by it: O, and in the backward
//
//   dS / ρ = P ∘ (m ∘ dO Vᵀ - delta / ρ)          dV / ρ = (m ∘ P)ᵀ dO
//
// The gradient of X is dX = dS ∘ (1 - tanh²(X / cap)).
#pragma once

#include <cmath>

#include "../../core/params.h"
#include "../ptx/math.cuh"
#include "../ptx/opaque.cuh"
#include "../tile/fragment.cuh"
#include "bias.cuh"
#include "dropout.cuh"
#include "online_softmax.cuh"
#include "plain_scores.cuh"
#include "softcap.cuh"
#include "softmax_bwd.cuh"

namespace flash_attn {

// What a kernel is compiled for.
struct ScoreTerms {
  bool softcap = false, alibi = false, bias = false, dropout = false;
};
inline constexpr ScoreTerms kAllTerms = {
    .softcap = true, .alibi = true, .bias = true, .dropout = true};

// The terms of one query head of one sequence. With kTransposed keys are the rows of an accumulator
// and queries its columns.
template <ScoreTerms kTerms>
class TermScores {
 public:
  static constexpr bool kGeneral = true;
  static constexpr float kLeastMax = kLeastScoreLog2;

  // params: FwdParams or BwdParams. diagonal: the key that query 0 meets on its diagonal.
  template <typename Params>
  __device__ __forceinline__ TermScores(const Params& params, int batch_idx, int head,
                                        int64_t diagonal)
      : inverse_scale_(1.f / params.softmax_scale), diagonal_(static_cast<int>(diagonal)) {
    const ScoreParams& score = params.score;
    if (kTerms.softcap && score.softcap > 0.f) {
      // Beyond 1e30 nothing is capped, and products would leave the range of fp32.
      cap_ = fminf(fmaxf(score.softcap * inverse_scale_, 1e-30f), 1e30f);
      inverse_cap_ = 1.f / cap_;
    }
    // Varlen: the rows before the first sequence and behind the last have no terms of their own.
    const int sequence = min(max(batch_idx, 0), params.batch - 1);
    if (kTerms.alibi && score.alibi_slopes != nullptr) {
      alibi_ = bounded_slope(score.alibi_slopes[sequence * score.alibi_batch_stride + head]) *
               inverse_scale_;
    }
    if (kTerms.bias && score.bias.data != nullptr) {
      const BiasParams& bias = score.bias;
      const int bytes = bias.dtype == DType::kBool ? 1 : bias.dtype == DType::kFp32 ? 4 : 2;
      bias_ = static_cast<const char*>(bias.data) +
              (sequence * bias.batch_stride + head * bias.head_stride) * bytes;
    }
    if (kTerms.dropout && params.dropout.rng_state != nullptr) {
      dropout_ = DropoutWords::of(params.dropout, int64_t{batch_idx} * params.heads_q + head);
    }
  }

  // Takes over those of all terms that are known to be there.
  template <ScoreTerms kAll>
  __device__ __forceinline__ explicit TermScores(const TermScores<kAll>& all)
      : cap_(all.cap_),
        inverse_cap_(all.inverse_cap_),
        alibi_(all.alibi_),
        inverse_scale_(all.inverse_scale_),
        diagonal_(all.diagonal_),
        bias_(all.bias_),
        dropout_(all.dropout_) {}

  // X becomes scores.
  template <bool kTransposed = false, int kMBlocks, int kN>
  __device__ __forceinline__ void finish(Accumulator<kMBlocks, kN>& S, ScorePlace place,
                                         int lane) const {
    if (kTerms.softcap && cap_ > 0.f) cap_scores(S, cap_, inverse_cap_);
    if (kTerms.alibi && alibi_ != 0.f) add_alibi<kTransposed>(S, place, lane);
  }

  // The same; slope becomes d score / dX where that is not 1, for differentiate().
  template <bool kTransposed = false, int kMBlocks, int kN>
  __device__ __forceinline__ void finish(Accumulator<kMBlocks, kN>& S,
                                         Accumulator<kMBlocks, kN>& slope, ScorePlace place,
                                         int lane) const {
    if (kTerms.softcap && cap_ > 0.f) cap_scores(S, slope, cap_, inverse_cap_);
    if (kTerms.alibi && alibi_ != 0.f) add_alibi<kTransposed>(S, place, lane);
  }

  // Adds the bias, after finish(). Hidden keys get -inf.
  template <typename Element, bool kTransposed = false, int kMBlocks, int kN>
  __device__ __forceinline__ void add_bias(Accumulator<kMBlocks, kN>& S, const BiasParams& params,
                                           ScorePlace place, int lane) const {
    if (!kTerms.bias || params.data == nullptr) return;
    with_bias_type<Element>(params.dtype, [&]<typename Number>(const Number*) {
      const Number* const bias = static_cast<const Number*>(bias_);
      if constexpr (kTransposed) {
        add_bias_transposed(S, params, bias, inverse_scale_, place.query, place.key, local(lane));
      } else {
        flash_attn::add_bias(S, params, bias, inverse_scale_, place.query, place.key, local(lane));
      }
    });
  }

  // What a bias that broadcasts the queries adds to the scores of a key.
  template <typename Element>
  __device__ __forceinline__ float bias_of_key(const BiasParams& params, int key) const {
    float number = -INFINITY;
    with_bias_type<Element>(params.dtype, [&]<typename Number>(const Number*) {
      const auto* const bias = static_cast<const Number*>(bias_);
      if (key < params.keys) number = load_bias(bias + key * params.key_stride);
    });
    return number * inverse_scale_;
  }

  // The same of a bias that lies in registers as an operand does.
  template <typename Element, int kMBlocks, int kN>
  __device__ __forceinline__ void add_bias(Accumulator<kMBlocks, kN>& S,
                                           const OperandA<kMBlocks, kN>& bias) const {
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float2 pair = unpack_bias<Element>(bias.data[m][n / 2][n % 2 * 2 + row]);
          float* const scores = S.data[m][n] + 2 * row;
          scores[0] = fmaf(pair.x, inverse_scale_, scores[0]);
          scores[1] = fmaf(pair.y, inverse_scale_, scores[1]);
        }
      }
    }
  }

  // What is dropped of P, rounded into an operand of 16 columns from first_key on, becomes 0.
  // of_query: draw_query_word() of each 16 rows.
  template <int kMBlocks>
  __device__ __forceinline__ void drop(uint32_t (&P)[kMBlocks][4], const DropoutParams& params,
                                       const uint32_t (&of_query)[kMBlocks], int first_key,
                                       int lane) const {
    if (!kTerms.dropout || params.rng_state == nullptr) return;
    const DropoutMask<false> mask(params, dropout_.last, first_key % 32 != 0);
    uint32_t of_keys[2];
    find_key_words(of_keys, params, first_key, local(lane));
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) mask.drop(P[m], of_query[m], of_keys);
  }

  // The same of fp32, of the 8 columns from first_key + col on, where col is known at compile time
  // and first_key a multiple of 16. of_keys: draw_key_words() of the 32 keys among which they are.
  template <int kMBlocks>
  __device__ __forceinline__ void drop(uint32_t (&P)[kMBlocks][4], const DropoutParams& params,
                                       const uint32_t (&of_query)[kMBlocks],
                                       const uint32_t (&of_keys)[2], int first_key, int col) const {
    if (!kTerms.dropout || params.rng_state == nullptr) return;
    const DropoutMask<false> mask(params, dropout_.last, (first_key + col) % 32 >= 16);
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
      bool kept[2][4];
      mask.find_kept(kept, of_query[m], of_keys);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!kept[row][col % 16 / 8 * 2 + i]) P[m][row + 2 * i] = 0;
        }
      }
    }
  }

  // The same of a whole operand, from a multiple of 32 on; of 16, if it has 16 columns.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ void drop(OperandA<kMBlocks, kN>& P, const DropoutParams& params,
                                       ScorePlace place, int lane) const {
    if (!kTerms.dropout || params.rng_state == nullptr) return;
    lane = local(lane);
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
      const uint32_t of_query = draw_query_word(params, place.query + 16 * m, lane);
      uint32_t of_keys[2];
      if constexpr (kN == 16) {
        find_key_words(of_keys, params, place.key, lane);
        DropoutMask<false>(params, dropout_.last, place.key % 32 != 0)
            .drop(P.data[m][0], of_query, of_keys);
      } else {
#pragma unroll
        for (int k = 0; k < kN / 16; k += 2) {
          find_key_words(of_keys, params, place.key + 16 * k, lane);
          drop_two(P, m, k, params, of_query, of_keys);
        }
      }
    }
  }

  // The same with the words in memory: draw_query_word() of the warp's first query, and key_word()
  // of the operand's keys, from a multiple of 32 on.
  template <int kN>
  __device__ __forceinline__ void drop(OperandA<1, kN>& P, const DropoutParams& params,
                                       uint32_t of_query, const uint32_t (&key_words)[kN / 4],
                                       int lane) const {
    if (!kTerms.dropout || params.rng_state == nullptr) return;
#pragma unroll
    for (int k = 0; k < kN / 16; k += 2) {
      const uint2 pair = *reinterpret_cast<const uint2*>(key_words + k * 4 + lane % 4 * 2);
      drop_two(P, 0, k, params, of_query, {pair.x, pair.y});
    }
  }

  // With 16 queries as columns and 16 keys as rows, what is dropped of P, rounded, becomes 0, and
  // negative in a second operand of the same place. of_key is what draw_key_word() gives.
  __device__ __forceinline__ void drop_and_mark(uint32_t (&P)[4], uint32_t (&marked)[4],
                                                const DropoutParams& params, ScorePlace place,
                                                uint32_t of_key, int lane) const {
    if (!kTerms.dropout || params.rng_state == nullptr) return;
    uint32_t of_queries[2];
    const int pair = dropout_pair(params, place.query, local(lane) % 4 * 2);
    of_queries[0] = dropout_.query_word(pair);
    of_queries[1] = dropout_.query_word(pair + 1);
    DropoutMask<true>(params, dropout_.last, place.key % 32 != 0)
        .drop_and_mark(P, marked, of_key, of_queries);
  }

  // Draws the word of the lane's row, where queries or where keys are rows: the mask of its
  // elements begins with it. The warp's rows begin at first_query or first_key.
  __device__ __forceinline__ uint32_t draw_query_word(const DropoutParams& params, int first_query,
                                                      int lane) const {
    if (!kTerms.dropout || params.rng_state == nullptr) return 0;
    return dropout_.query_word(dropout_pair(params, first_query, lane / 4));
  }
  __device__ __forceinline__ uint32_t draw_key_word(const DropoutParams& params, int first_key,
                                                    int lane) const {
    if (!kTerms.dropout || params.rng_state == nullptr) return 0;
    return dropout_.key_word(dropout_four(params, first_key, lane / 4));
  }
  // Draws the words of the lane's columns among 32 keys, where keys are columns.
  __device__ __forceinline__ void draw_key_words(uint32_t (&words)[2], const DropoutParams& params,
                                                 int first_key, int lane) const {
    if (!kTerms.dropout || params.rng_state == nullptr) return;
    find_key_words(words, params, first_key, local(lane));
  }

  // dO Vᵀ becomes dS / ρ, and what is dropped of P becomes 0.
  template <bool kTransposed = false, int kMBlocks, int kN>
  __device__ __forceinline__ void gradient(Accumulator<kMBlocks, kN>& dP,
                                           Accumulator<kMBlocks, kN>& P,
                                           const float (&delta)[2 * kMBlocks],
                                           const DropoutParams& params, ScorePlace place,
                                           int lane) const {
    static_assert(!kTransposed, "delta belongs to rows");
    if (!kTerms.dropout || params.rng_state == nullptr) return softmax_gradient(dP, P, delta);
    lane = local(lane);
    uint32_t of_query[kMBlocks];
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
      of_query[m] = draw_query_word(params, place.query + 16 * m, lane);
    }
#pragma unroll
    for (int k = 0; k < kN; k += 16) {
      const DropoutMask<false> mask(params, dropout_.last, (place.key + k) % 32 != 0);
      uint32_t of_keys[2];
      find_key_words(of_keys, params, place.key + k, lane);
#pragma unroll
      for (int m = 0; m < kMBlocks; ++m) {
        bool kept[2][4];
        mask.find_kept(kept, of_query[m], of_keys);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float row_delta = delta[2 * m + row] * params.keep;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& p = P.at(2 * m + row, k / 4 + i);
            float& ds = dP.at(2 * m + row, k / 4 + i);
            const float of_sum = -row_delta * p;
            ds = kept[row][i] ? fmaf(p, ds, of_sum) : of_sum;
            p = kept[row][i] ? p : 0.f;
          }
        }
      }
    }
  }

  // dS / ρ, where the gradient of the bias is dS itself.
  template <typename Element, int kMBlocks, int kN>
  __device__ __forceinline__ void store_bias_gradient(const Accumulator<kMBlocks, kN>& dS,
                                                      const BiasGradientParams& params,
                                                      const DropoutParams& dropout, int batch_idx,
                                                      int head, ScorePlace place, int lane) const {
    if (params.form != BiasGradientParams::Form::kWhole) return;
    const int64_t offset = batch_idx * params.batch_stride + head * params.head_stride;
    with_bias_gradient_type<Element>(params.dtype, [&]<typename Number>(const Number*) {
      flash_attn::store_bias_gradient(dS, params, static_cast<Number*>(params.data) + offset,
                                      output_scale(dropout), place.query, place.key, local(lane));
    });
  }

  // dS becomes dX.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ void differentiate(Accumulator<kMBlocks, kN>& dS,
                                                const Accumulator<kMBlocks, kN>& slope) const {
    if (kTerms.softcap && cap_ > 0.f) {
#pragma unroll
      for (int row = 0; row < dS.kRows; ++row) {
#pragma unroll
        for (int i = 0; i < dS.kRowElements; ++i) dS.at(row, i) *= slope.at(row, i);
      }
    }
  }

  __device__ __forceinline__ SoftcapTanh softcap_tanh() const { return {cap_, inverse_cap_}; }
  // The cap in the unit of Q Kᵀ; without softcap it is 0.
  __device__ __forceinline__ float cap() const { return cap_; }
  // One score of X, by the special-function unit.
  __device__ __forceinline__ float capped(float x) const {
    return flash_attn::capped(x, cap_, inverse_cap_);
  }
  // What a score loses a key away from the diagonal, in the unit of Q Kᵀ; 0: no ALiBi.
  __device__ __forceinline__ float alibi() const { return alibi_; }
  // The distance of the first query's diagonal from the first key.
  __device__ __forceinline__ int to_diagonal(ScorePlace place) const {
    return place.query + diagonal_ - place.key;
  }
  __device__ __forceinline__ float inverse_scale() const { return inverse_scale_; }

  // ρ: what O, dQ, dK and dV are multiplied by.
  __device__ __forceinline__ static float output_scale(const DropoutParams& params) {
    return params.scale;
  }

 private:
  // Keeps what follows from the lane alone from being computed before a kernel's loop, where it
  // would take registers throughout.
  __device__ __forceinline__ static int local(int lane) {
    return static_cast<int>(ptx::opaque(lane));
  }

  // draw_key_words() where there is dropout.
  __device__ __forceinline__ void find_key_words(uint32_t (&words)[2], const DropoutParams& params,
                                                 int first_key, int lane) const {
#pragma unroll
    for (int neighbour = 0; neighbour < 2; ++neighbour) {
      words[neighbour] =
          dropout_.key_word(dropout_four(params, first_key, lane % 4 * 2 + neighbour));
    }
  }

  // Two blocks of keys, k and k + 1.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ void drop_two(OperandA<kMBlocks, kN>& P, int m, int k,
                                           const DropoutParams& params, uint32_t of_query,
                                           const uint32_t (&of_keys)[2]) const {
    static_assert(kN % 32 == 0);
    DropoutMask<false>(params, dropout_.last, false).drop(P.data[m][k], of_query, of_keys);
    DropoutMask<false>(params, dropout_.last, true).drop(P.data[m][k + 1], of_query, of_keys);
  }

  // S -= slope · |key - diagonal(query)|
  template <bool kTransposed, int kMBlocks, int kN>
  __device__ __forceinline__ void add_alibi(Accumulator<kMBlocks, kN>& S, ScorePlace place,
                                            int lane) const {
    // slope · distance grows by this from a column to the next, and shrinks by it down the rows.
    const float step = kTransposed ? -alibi_ : alibi_;
    lane = local(lane);
    const auto corner = static_cast<float>(place.key - place.query - diagonal_);
    const auto combine = [&](const auto& subtract) {
#pragma unroll
      for (int row = 0; row < S.kRows; ++row) {
        const int from_corner = fragment_col(0, lane) - (row / 2 * 16 + fragment_row(row, lane));
        const float first = fmaf(alibi_, corner, step * static_cast<float>(from_corner));
#pragma unroll
        for (int i = 0; i < S.kRowElements; ++i) {
          const float bias = fmaf(step, static_cast<float>(fragment_col(i, 0)), first);
          S.at(row, i) = subtract(S.at(row, i), fabsf(bias));
        }
      }
    };
    if (alibi_ > 0.f) {
      combine([](float score, float bias) { return score - bias; });
    } else {
      combine([](float score, float bias) { return score + bias; });
    }
  }

  template <ScoreTerms>
  friend class TermScores;

  float cap_ = 0.f, inverse_cap_ = 0.f;  // 0: none
  float alibi_ = 0.f;                    // 0: none
  float inverse_scale_;
  int diagonal_;
  const void* bias_ = nullptr;
  DropoutWords dropout_;
};

using GeneralScores = TermScores<kAllTerms>;

}  // namespace flash_attn
