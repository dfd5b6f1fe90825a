// A warpgroup's transposed scores in the backward, Sᵀ of 64 keys (rows) and kBlockM queries: how S
// becomes P, and how P and dP become dS.
#pragma once

#include "../cuda/attn/mask.cuh"
#include "../cuda/attn/online_softmax.cuh"
#include "../cuda/attn/score_policy.cuh"
#include "../cuda/attn/softmax_bwd.cuh"
#include "../cuda/tile/fragment.cuh"
#include "bwd_work.cuh"
#include "ptx/stmatrix.cuh"

namespace flash_attn::sm90 {

// P = exp(S - LSE), everywhere.
template <int kBlockM, typename Values>
__device__ __forceinline__ void exponentiate(Accumulator<1, kBlockM>& S, float scale_log2,
                                             const Values& lse_log2) {
#pragma unroll
  for (int n = 0; n < kBlockM / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& s = S.data[0][n][i];
      s = flash_attn::ptx::exp2(lse_log2.exponent(s, scale_log2, n, i));
    }
  }
}

// Makes P 0 where nothing is seen. It comes after the exponential, which may overflow there. row:
// the first of the warp's 16 keys, counted from work.first_key.
template <int kBlockM>
__device__ __forceinline__ void hide_unseen(Accumulator<1, kBlockM>& P, const BwdWork& work,
                                            int row, int first_query, int lane) {
  const int key = work.first_key + row + fragment_row(0, lane);
  mask_queries(P, work.window, {key, key + 8}, first_query, lane);
}

// Rounds P as dV needs it, of the queries from kFirst to kEnd of the block.
template <typename Element, int kFirst, int kEnd, int kBlockM>
__device__ __forceinline__ void round_scores(OperandA<1, kBlockM>& P,
                                             const Accumulator<1, kBlockM>& S) {
#pragma unroll
  for (int n = kFirst / 8; n < kEnd / 8; ++n) {
    const float (&s)[4] = S.data[0][n];
    P.data[0][n / 2][n % 2 * 2] = flash_attn::ptx::pack<Element>(s[0], s[1]);
    P.data[0][n / 2][n % 2 * 2 + 1] = flash_attn::ptx::pack<Element>(s[2], s[3]);
  }
}

// dS = P ∘ (dP - delta), the gradient of softmax_scale · S, of kQueries queries from kFirst on.
// delta is that of these queries.
template <typename Element, int kFirst, int kQueries, int kBlockM, template <int> typename Values>
__device__ __forceinline__ void differentiate(OperandA<1, kBlockM>& dS,
                                              const Accumulator<1, kBlockM>& P,
                                              const Accumulator<1, kBlockM>& dP,
                                              const Values<kQueries>& delta) {
#pragma unroll
  for (int n = kFirst / 8; n < (kFirst + kQueries) / 8; ++n) {
    const auto of = [&](int i) {
      return P.data[0][n][i] * delta.difference(dP.data[0][n][i], n - kFirst / 8, i);
    };
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      dS.data[0][n / 2][n % 2 * 2 + row] =
          flash_attn::ptx::pack<Element>(of(2 * row), of(2 * row + 1));
    }
  }
}

// Puts P of 16 queries, as dV needs it, into registers; or, if they are among the last kLate blocks
// of 16, into late_p, where they wait.
template <int kBlockM, int kLate, int kThreads>
__device__ __forceinline__ void put_early_or_late(OperandA<1, kBlockM>& P,
                                                  uint4 (&late_p)[kLate][kThreads], int thread,
                                                  int k, const uint32_t (&rounded)[4]) {
  constexpr int kEarly = kBlockM / 16 - kLate;
  if (k < kEarly) {
#pragma unroll
    for (int r = 0; r < 4; ++r) P.data[0][k][r] = rounded[r];
  } else {
    late_p[k - kEarly][thread] = {rounded[0], rounded[1], rounded[2], rounded[3]};
  }
}
// Then takes those that waited into registers.
template <int kBlockM, int kLate, int kThreads>
__device__ __forceinline__ void take_late(OperandA<1, kBlockM>& P,
                                          const uint4 (&late_p)[kLate][kThreads], int thread) {
#pragma unroll
  for (int late = 0; late < kLate; ++late) {
    const uint4 registers = late_p[late][thread];
    uint32_t (&block)[4] = P.data[0][kBlockM / 16 - kLate + late];
    block[0] = registers.x;
    block[1] = registers.y;
    block[2] = registers.z;
    block[3] = registers.w;
  }
}

// A bound of the squares of a thread's scores. Their maximum would take a pipe that is half as
// wide. So the scores are dealt out into small groups, and the squares of each group are summed up.
// A sum is at least the largest of its squares. The fewer squares a sum has, the less it exceeds
// the largest of them.
template <int kBlockM>
__device__ __forceinline__ float bound_squares(const Accumulator<1, kBlockM>& S) {
  constexpr int kSums = kBlockM / 8;
  float sums[kSums] = {};
#pragma unroll
  for (int n = 0; n < kBlockM / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& sum = sums[(4 * n + i) % kSums];
      sum = fmaf(S.data[0][n][i], S.data[0][n][i], sum);
    }
  }
  float largest = 0.f;
#pragma unroll
  for (const float sum : sums) largest = fmaxf(largest, sum);
  return largest;
}

// Computes P with a softcap, as dV needs it, of what `cap` takes in the place of S. There it leaves
// P times the slope, which is a factor of dX.
template <typename Element, int kBlockM, int kLate, int kThreads, typename Cap>
__device__ __forceinline__ void exponentiate_with_slope(
    OperandA<1, kBlockM>& P, uint4 (&late_p)[kLate][kThreads], int thread,
    Accumulator<1, kBlockM>& S, const Cap& cap, const float (&lse_log2)[kBlockM], int lane) {
#pragma unroll
  for (int i = 0; i < kBlockM / 16; ++i) {
    const int k =
        (i + kBlockM / 16 - kLate) % (kBlockM / 16);  // what waits comes first: fewer registers
    Accumulator<1, 16> part;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(lse_log2 + 16 * k + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = S.data[0][2 * k + n][i];
        float& p = part.data[0][n][i];
        p = flash_attn::ptx::exp2(cap.exponent(s, i % 2 == 0 ? lse.x : lse.y));
        s = p * cap.slope(s);
      }
    }
    const OperandA<1, 16> rounded = to_operand_a<Element>(part);
    put_early_or_late(P, late_p, thread, k, rounded.data[0][0]);
  }
}

// Computes P with a softcap, as dV needs it. In the place of S it leaves P times the slope. Which
// form serves depends on the largest score of the warp.
template <typename Element, int kBlockM, int kLate, int kThreads>
__device__ __forceinline__ void exponentiate_capped(OperandA<1, kBlockM>& P,
                                                    uint4 (&late_p)[kLate][kThreads], int thread,
                                                    Accumulator<1, kBlockM>& S,
                                                    const SoftcapTanh& tanh, float scale_log2,
                                                    const float (&lse_log2)[kBlockM], bool masked,
                                                    const BwdWork& work, int row, int first_query,
                                                    int lane) {
  const float largest = bound_squares(S);
  const auto apply = [&](const auto& tanh_of) {
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) S.data[0][n][i] = tanh_of(S.data[0][n][i]);
    }
  };
  const bool small = __all_sync(~0u, tanh.are_small(largest, scale_log2));
  if (!small) {
    if (__all_sync(~0u, tanh.are_near(largest))) {
      apply([&](float x) { return tanh.near(x); });
    } else {
      apply([&](float x) { return tanh.anywhere(x); });
    }
  }
  if (masked) {
    const int key = work.first_key + row + fragment_row(0, lane);
    mask_queries(S, work.window, {key, key + 8}, first_query, lane,
                 small ? tanh.hidden_small() : tanh.hidden_tanh());
  }
  if (small) {
    exponentiate_with_slope<Element>(P, late_p, thread, S, tanh.of_small(scale_log2), lse_log2,
                                     lane);
  } else {
    exponentiate_with_slope<Element>(P, late_p, thread, S, tanh.of_tanh(scale_log2), lse_log2,
                                     lane);
  }
}

// Rounds P likewise, of the queries from kFirst to kEnd. P is negative where it is dropped.
template <typename Element, int kFirst, int kEnd, int kBlockM>
__device__ __forceinline__ void round_kept(OperandA<1, kBlockM>& P,
                                           const Accumulator<1, kBlockM>& S) {
#pragma unroll
  for (int n = kFirst / 8; n < kEnd / 8; ++n) {
    const float (&s)[4] = S.data[0][n];
    P.data[0][n / 2][n % 2 * 2] = flash_attn::ptx::pack_positive<Element>(s[0], s[1]);
    P.data[0][n / 2][n % 2 * 2 + 1] = flash_attn::ptx::pack_positive<Element>(s[2], s[3]);
  }
}

// Whether dropout keeps the lane's i-th element of the n-th eight queries, by the bits of their 64
// queries (KeptBits::of_keys). Tests of all bits of a byte become one instruction.
__device__ __forceinline__ bool is_kept(uint2 bits, int n, int i) {
  return ((n % 8 < 4 ? bits.x : bits.y) & 1u << (n % 4 * 8 + i)) != 0;
}

// Changes the sign of what is dropped of P, whose columns are queries, by a predicated
// multiplication. A select would take the pipe of integers and comparisons, which has half as many
// lanes. minus_one: -1, as a number that ptxas does not know; of one that it knows it makes a
// select. kept(n): the bits of the n-th 64 queries.
template <int kN, typename Kept>
__device__ __forceinline__ void negate_dropped(Accumulator<1, kN>& P, const Kept& kept,
                                               float minus_one) {
#pragma unroll
  for (int part = 0; part < kN / 64; ++part) {
    const uint2 bits = kept(part);
#pragma unroll
    for (int n = part * 8; n < part * 8 + 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!is_kept(bits, n, i)) P.data[0][n][i] *= minus_one;
      }
    }
  }
}

// dS / ρ = P ∘ (m ∘ dP - delta / ρ), of the queries from kFirst to kEnd, from P with any sign.
// `kept` has the bits of their 64 queries.
template <typename Element, int kFirst, int kEnd, int kBlockM>
__device__ __forceinline__ void differentiate_kept(OperandA<1, kBlockM>& dS,
                                                   const Accumulator<1, kBlockM>& P,
                                                   const Accumulator<1, kBlockM>& dP, uint2 kept,
                                                   const float (&delta)[kBlockM], int lane) {
#pragma unroll
  for (int n = kFirst / 8; n < kEnd / 8; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(delta + n * 8 + lane % 4 * 2);
    const auto of = [&](int i) {
      const float p = fabsf(P.data[0][n][i]);
      float ds = -p * (i % 2 == 0 ? pair.x : pair.y);
      if (is_kept(kept, n, i)) ds = fmaf(p, dP.data[0][n][i], ds);
      return ds;
    };
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      dS.data[0][n / 2][n % 2 * 2 + row] =
          flash_attn::ptx::pack<Element>(of(2 * row), of(2 * row + 1));
    }
  }
}

// Computes P with any score terms and rounds it twice. P is as dV needs it, 0 where it is dropped.
// `weights` is what dX consists of beside dP and delta: P times the softcap's slope, negative where
// it is dropped. Both carry the factor kExactScale, as lse_log2 does. 16 queries are computed at a
// time, so that neither S nor that slope is kept. place: that of the warp's S. keep(k, weights,
// marked) gets the weights of 16 queries as fp32, and as rounded, negative where they are dropped.
template <typename Element, int kBlockM, typename Policy, typename Keep>
__device__ __forceinline__ void exponentiate(OperandA<1, kBlockM>& P, OperandA<1, kBlockM>& weights,
                                             const Accumulator<1, kBlockM>& S, const Policy& score,
                                             const BwdParams& params, float scale_log2,
                                             const float (&lse_log2)[kBlockM], bool masked,
                                             const BwdWork& work, ScorePlace place, int lane,
                                             const Keep& keep) {
  const uint32_t key_word = score.draw_key_word(params.dropout, place.key, lane);
#pragma unroll
  for (int k = 0; k < kBlockM / 16; ++k) {
    const ScorePlace at = {place.query + 16 * k, place.key};
    Accumulator<1, 16> part, slope;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) part.data[0][n][i] = S.data[0][2 * k + n][i];
    }
    slope.fill(1.f);
    score.template finish<true>(part, slope, at, lane);
    score.template add_bias<Element, true>(part, params.score.bias, at, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(lse_log2 + 16 * k + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = part.data[0][n][i];
        s = flash_attn::ptx::exp2(fmaf(s, scale_log2, -(i % 2 == 0 ? lse.x : lse.y)));
      }
    }
    if (masked) {
      const int key = place.key + fragment_row(0, lane);
      mask_queries(part, work.window, {key, key + 8}, at.query, lane);
    }
    const OperandA<1, 16> rounded = to_operand_a<Element>(part);
    score.differentiate(part, slope);
    const OperandA<1, 16> weight = to_operand_a<__half>(part);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      P.data[0][k][r] = rounded.data[0][0][r];
      weights.data[0][k][r] = weight.data[0][0][r];
    }
    score.drop_and_mark(P.data[0][k], weights.data[0][k], params.dropout, at, key_word, lane);
    keep(k, part, weights.data[0][k]);
  }
}

// S += factor · bias, from a tile with queries as rows and keys as columns. key: the warp's first.
template <typename Tile, int kBlockM>
__device__ __forceinline__ void add_bias(Accumulator<1, kBlockM>& S, const Tile& bias, float factor,
                                         int key, int lane) {
  const uint32_t address = bias.address(lane % 8 + lane / 16 * 8, key + lane / 8 % 2 * 8);
#pragma unroll
  for (int query = 0; query < kBlockM; query += 16) {
    uint32_t pairs[4];
    flash_attn::ptx::ldmatrix_x4_trans(pairs, Tile::advance(address, query, 0));
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float2 pair = unpack_bias<typename Tile::Element>(pairs[r]);
      float* const scores = S.data[0][query / 8 + r / 2] + r % 2 * 2;
      scores[0] = fmaf(pair.x, factor, scores[0]);
      scores[1] = fmaf(pair.y, factor, scores[1]);
    }
  }
}

// Stores dSᵀ to a tile with queries as rows and keys as columns. key: the warp's first.
template <typename Tile, int kBlockM>
__device__ __forceinline__ void store_transposed(Tile& tile, const OperandA<1, kBlockM>& dS,
                                                 int key, int lane) {
  const uint32_t address = tile.address(lane % 8 + lane / 16 * 8, key + lane / 8 % 2 * 8);
#pragma unroll
  for (int query = 0; query < kBlockM; query += 16) {
    ptx::stmatrix_x4_trans(Tile::advance(address, query, 0), dS.data[0][query / 16]);
  }
}

// Stashes the fp32 weights of 16 queries of a thread, negative where they are dropped.
template <int kBlocks, int kThreads>
__device__ __forceinline__ void stash(float4 (&place)[kBlocks][kThreads], int thread, int k,
                                      const Accumulator<1, 16>& weights,
                                      const uint32_t (&marked)[4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const auto with_sign = [&](int i) {
      const uint32_t pair = marked[2 * n + i / 2];
      const uint32_t sign = (i % 2 == 0 ? pair << 16 : pair) & 0x80000000u;
      return __uint_as_float(__float_as_uint(weights.data[0][n][i]) | sign);
    };
    place[2 * k + n][thread] = {with_sign(0), with_sign(1), with_sign(2), with_sign(3)};
  }
}

// dX = weight · (dP - delta), without dP where the weight is negative. The weight carries the
// factor kExactScale, and delta is divided by it. With dropout this lacks the factor ρ
// (cuda/attn/score_policy.cuh), and delta is delta / ρ.
__device__ __forceinline__ float differentiate_weight(float weight, float dp, float delta) {
  const float difference = fmaf(dp, 1 / kExactScale, -delta);
  return weight * (__float_as_int(weight) < 0 ? delta : difference);
}

// Does so with the thread's fp32 weights.
template <typename Element, int kBlockM, int kThreads>
__device__ __forceinline__ void differentiate_weights(
    OperandA<1, kBlockM>& dX, const float4 (&weights)[kBlockM / 8][kThreads], int thread,
    const Accumulator<1, kBlockM>& dP, const float (&delta)[kBlockM], int lane) {
#pragma unroll
  for (int n = 0; n < kBlockM / 8; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(delta + n * 8 + lane % 4 * 2);
    const float4 weight = weights[n][thread];
    const float (&dp)[4] = dP.data[0][n];
    uint32_t (&x)[4] = dX.data[0][n / 2];
    x[n % 2 * 2] = flash_attn::ptx::pack<Element>(differentiate_weight(weight.x, dp[0], pair.x),
                                                  differentiate_weight(weight.y, dp[1], pair.y));
    x[n % 2 * 2 + 1] =
        flash_attn::ptx::pack<Element>(differentiate_weight(weight.z, dp[2], pair.x),
                                       differentiate_weight(weight.w, dp[3], pair.y));
  }
}

}  // namespace flash_attn::sm90
