// Tile sizes of the sm90 forward, by head-dim class.
#pragma once

#include <cstdint>

#include "../cuda/dispatch.h"

namespace flash_attn::sm90 {

using cuda::with_dtype;

// Calls f.template operator()<class of q and k, class of v>(). Beside the classes of all kernels:
// 48, 80 and 160, as the next class would spend a sixth to a quarter of its products on the zeros
// of d = 40, 72, 80 and 160, which models use; and 192 with a narrower v of 128. Any other v is
// filled up with zeros.
template <typename F>
auto with_head_dim_class(int head_dim, int head_dim_v, F&& f) {
  const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (widest <= 48) return f.template operator()<48, 48>();
  if (widest > 64 && widest <= 80) return f.template operator()<80, 80>();
  if (head_dim > 128 && head_dim <= 192 && head_dim_v <= 128) {
    return f.template operator()<192, 128>();
  }
  if (widest > 128 && widest <= 160) return f.template operator()<160, 160>();
  return cuda::with_head_dim_class(
      widest, [&]<int kClass> { return f.template operator()<kClass, kClass>(); });
}

struct FwdTile {
  int consumers;  // warpgroups that compute, 64 queries each
  int block_n;    // keys of an iteration
  int stages;     // tiles of K, and of V, in shared memory
  int q_stages;   // tiles of Q; with two, a tile begins before the one before has ended
  // 64 (d = 80, 96, 160: 32) columns each of O, on its way out; a divisor of those of O.
  int output_slabs;
  bool ordered;  // consumers take turns at the tensor cores
  // On a multiprocessor. With one, the next P is made while the tensor cores still read this one: with
  // more than about 195 of 240 (130 of 160) registers taken by S, O and two P, ptxas serialises
  // wgmma. With two, one's products run beside the other's softmax and tile ends, so a consumer does
  // one thing after the other and `ordered` is false.
  int blocks = 1;

  constexpr int block_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  // Of 64 K registers; the producers have enough with the rest. setmaxnreg deals with what the block
  // got at the start, the same for each thread in eights: asking for more hangs.
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
  constexpr int consumer_registers() const {
    return blocks == 2 ? 104 : consumers == 3 ? 160 : 240;
  }
};

template <int kHeadDim, int kHeadDimV>
inline constexpr FwdTile kFwdTile = {};

// TFLOP/s on an H200, bf16, full / causal, ± 5 %. First the tile's own, of one run; what was tried
// beside it as a ratio to it, of other runs (benchmarks/NOTES.md). Those of d = 64 with many
// queries, 128 and 256 are from before dominant keys were kept exact
// (OnlineSoftmax::spare_largest): today 507 / 490, 615 / 610 and 688 (full) at 16k, settled.
//
// d = 40, s = 8k 340 / 324, 2k 291 / 236. Two stages: 0.98 / 0.98 (8k); four 0.99 / 1.00; two
// consumers, 128 keys: 0.89 / 0.89 (8k), 1.03 / 1.08 (1k). Four consumers of 112 registers, 80 keys
// not ahead: 1.01 / 1.00 (8k), 1.09 / 1.07 (2k), but dominant keys are not exact
// (OnlineSoftmax::step_ahead).
template <>
inline constexpr FwdTile kFwdTile<48, 48> = {
    .consumers = 3, .block_n = 96, .stages = 3, .q_stages = 2, .output_slabs = 1, .ordered = true};
// s = 16k 536 / 511, 2k 439 / 361. Turns passed on after S instead of at once: 1.00 / 0.99. Earlier
// forms: 80 keys 0.94 / 0.93; 128 keys not ahead 0.95 / 0.94 (16k).
template <>
inline constexpr FwdTile kFwdTile<64, 64> = {
    .consumers = 3, .block_n = 96, .stages = 2, .q_stages = 2, .output_slabs = 1, .ordered = true};
// Three consumers with few queries: 192 rows do not divide short sequences.
inline constexpr int kFewQueries = 1024;
template <int kHeadDim>
inline constexpr FwdTile kFewQueriesTile = {.consumers = 2,
                                            .block_n = 128,
                                            .stages = 2,
                                            .q_stages = 2,
                                            .output_slabs = kHeadDim < 64 ? 1 : 3,
                                            .ordered = true};
// d = 64: at the end of a tile both consumers of a block stand still at once; another block's do
// not. s = 512 334 / 227, 1k 384 / 307, 2k 406 / 365. One block of 2 × 128 keys: 0.93 / 0.90 (512),
// 0.97 / 0.88 (1k); 3 × 96 keys: 1.07 / 0.97 (2k), 1.19 / 1.14 (16k). 80 keys: 0.96 / 0.96 (512).
inline constexpr int kFewMaskedQueries = 2048;
template <>
inline constexpr FwdTile kFewQueriesTile<64> = {.consumers = 2,
                                                .block_n = 64,
                                                .stages = 3,
                                                .q_stages = 2,
                                                .output_slabs = 1,
                                                .ordered = false,
                                                .blocks = 2};
// With 128 rows to a tile of K and V, TMA seems to bound these two (rows of three boxes of 64
// bytes, in d = 72 across sectors): five k-steps in the place of six gained 3 %, 192 rows gain
// more.
//
// d = 80, s = 8k 528 / 487, 16k 532 / 510; d = 72, 8k 456 / 421. Two stages: 0.98 / 0.98, 0.95 /
// 0.98 (d = 72); four, O in three parts: 1.00 / 1.01 (8k), 1.02 / 1.03 (16k); two consumers, 128
// keys: 0.96 / 0.98, 0.78 / 0.84 (d = 72), 1.04 / 1.17 (1k). 96 keys not ahead: 0.97 / 1.00.
template <>
inline constexpr FwdTile kFwdTile<80, 80> = {
    .consumers = 3, .block_n = 80, .stages = 3, .q_stages = 2, .output_slabs = 3, .ordered = true};
// s = 8k 588 / 554. Two stages: 0.99 / 0.98; two consumers, 128 keys: 0.95 / 0.96.
template <>
inline constexpr FwdTile kFwdTile<96, 96> = {
    .consumers = 3, .block_n = 80, .stages = 3, .q_stages = 2, .output_slabs = 3, .ordered = true};
// s = 16k 681 / 653, 512 461 / 298. Without turns: 1.00 / 0.98 (16k), 0.96 / 0.98 (1k); turns
// passed on after S: 0.99 / 0.98 (16k). An earlier form, not ahead: 128 keys 624 / 622, 176 keys
// 619 / 618.
template <>
inline constexpr FwdTile kFwdTile<128, 128> = {
    .consumers = 2, .block_n = 128, .stages = 2, .q_stages = 2, .output_slabs = 2, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<192, 128> = {
    .consumers = 2, .block_n = 128, .stages = 2, .q_stages = 1, .output_slabs = 1, .ordered = true};
// s = 8k 654 / 617. In tiles of 192 columns, 96 keys: 0.98 to 1.03; as d = 192: 0.88.
template <>
inline constexpr FwdTile kFwdTile<160, 160> = {
    .consumers = 2, .block_n = 112, .stages = 2, .q_stages = 1, .output_slabs = 5, .ordered = true};
// s = 8k, an earlier form: 96 keys ahead 672 / 650; 112 not ahead 677 / 633. 64 keys with three
// stages, or with two of Q: 0.99 / 0.99, 0.98 / 0.98.
template <>
inline constexpr FwdTile kFwdTile<192, 192> = {
    .consumers = 2, .block_n = 96, .stages = 2, .q_stages = 1, .output_slabs = 1, .ordered = true};
// s = 16k 729 / 702, 512 485 / 317. Without turns: 0.97 / 1.01 (16k), 1.00 / 0.99 (512). 80 keys
// not ahead, O in the place of Q: 0.93 / 0.98 (16k), 0.82 / 0.90 (512).
template <>
inline constexpr FwdTile kFwdTile<256, 256> = {
    .consumers = 2, .block_n = 64, .stages = 2, .q_stages = 1, .output_slabs = 2, .ordered = true};

// With several score terms: as many keys as leave room for the terms in registers, and for dropout a
// multiple of 32.
using cuda::has_score_terms;
template <typename F>
auto with_scores_class(int head_dim, int head_dim_v, F&& f) {
  if (head_dim <= 128 && head_dim_v <= 128) return f.template operator()<128>();
  return f.template operator()<256>();
}
template <int kHeadDim>
inline constexpr FwdTile kScoresTile = {};
template <>
inline constexpr FwdTile kScoresTile<128> = {
    .consumers = 2, .block_n = 96, .stages = 2, .q_stages = 2, .output_slabs = 2, .ordered = true};
template <>
inline constexpr FwdTile kScoresTile<256> = {
    .consumers = 2, .block_n = 32, .stages = 3, .q_stages = 1, .output_slabs = 2, .ordered = true};

// A staged bias takes the place of a tile of Q at d = 128; at d = 64, three consumers' 160 registers are
// too few for it. A softcap, ALiBi or dropout alone runs in the tiles of plain calls. Head dims up to
// 128.
template <int kHeadDim>
inline constexpr FwdTile kStagedBiasTile = {.consumers = 2,
                                            .block_n = 128,
                                            .stages = 2,
                                            .q_stages = kHeadDim <= 64 ? 2 : 1,
                                            .output_slabs = 1,
                                            .ordered = true};
inline constexpr int kOneTermHeadDim = 128;
template <typename F>
auto with_one_term_class(int head_dim, int head_dim_v, F&& f) {
  if (head_dim <= 64 && head_dim_v <= 64) return f.template operator()<64>();
  return f.template operator()<128>();
}

// With the keys in pieces: few queries in any case. Two classes, head dims up to 128: this is one more
// kernel for each. d = 256 would spill registers at its end, where O goes out in fp32.
template <int kHeadDim>
inline constexpr FwdTile kPiecesTile = kFwdTile<kHeadDim, kHeadDim>;
template <>
inline constexpr FwdTile kPiecesTile<64> = kFewQueriesTile<64>;
template <typename F>
auto with_pieces_class(int head_dim, F&& f) {
  if (head_dim <= 64) return f.template operator()<64>();
  return f.template operator()<128>();
}

// With max_logits: four classes, as each is one more kernel; among them that of multi-head latent
// attention.
template <typename F>
auto with_max_logits_class(int head_dim, int head_dim_v, F&& f) {
  const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (widest <= 64) return f.template operator()<64, 64>();
  if (widest <= 128) return f.template operator()<128, 128>();
  if (head_dim <= 192 && head_dim_v <= 128) return f.template operator()<192, 128>();
  return f.template operator()<256, 256>();
}

// Calls f.template operator()<FwdTile>(). masked: not every query sees all keys.
template <int kHeadDim, int kHeadDimV, typename F>
auto with_fwd_tile(int seqlen_q, bool masked, F&& f) {
  if constexpr (kFwdTile<kHeadDim, kHeadDimV>.consumers == 3) {
    const int few = kHeadDim == 64 && masked ? kFewMaskedQueries : kFewQueries;
    if (seqlen_q <= few) return f.template operator()<kFewQueriesTile<kHeadDim>>();
  }
  return f.template operator()<kFwdTile<kHeadDim, kHeadDimV>>();
}

}  // namespace flash_attn::sm90
