// What the forward's loop is compiled for, and the score policies of its forms.
#pragma once

#include <cfloat>
#include <type_traits>

#include "../cuda/attn/score_policy.cuh"
#include "fwd_steps.cuh"
#include "masked_scores.cuh"

namespace flash_attn::sm90 {

// The loop's instances. kScores: with score terms, each decided by a branch that all threads take
// alike. kPieces: a tile of queries with a piece of its keys is a tile of its own, whose O is a
// partial result in fp32. For calls with no other term: kSoftcap, kAlibi, kStagedBias (a bias that
// TMA can read, through shared memory), kKeyBias (one that broadcasts the queries), kDropout.
// kMaxLogits: no term, and the largest score of each head is kept. kMasked: no term, and a mask
// whose hidden tiles are passed over.
enum class FwdForm {
  kPlain,
  kScores,
  kPieces,
  kSoftcap,
  kAlibi,
  kStagedBias,
  kKeyBias,
  kDropout,
  kMaxLogits,
  kMasked
};

constexpr bool has_plain_scores(FwdForm form) {
  return form == FwdForm::kPlain || form == FwdForm::kMaxLogits || form == FwdForm::kPieces;
}
constexpr ScoreTerms terms_of(FwdForm form) {
  if (form == FwdForm::kSoftcap) return {.softcap = true};
  if (form == FwdForm::kAlibi) return {.alibi = true};
  if (form == FwdForm::kStagedBias) return {.bias = true};
  if (form == FwdForm::kDropout) return {.dropout = true};
  if (form == FwdForm::kKeyBias) return {};  // added from shared memory
  return kAllTerms;
}

// PlainScores, and the largest score of the head that is known when a tile begins, in units of log
// 2 (LogitRecord).
class RecordedScores : public PlainScores {
 public:
  template <typename Params>
  __device__ __forceinline__ RecordedScores(const Params& params, int /*batch_idx*/, int head,
                                            int64_t /*diagonal*/)
      : known_(*static_cast<volatile const float*>(params.max_logits + head) * kLog2E) {}

  __device__ __forceinline__ float known() const { return known_; }

 private:
  float known_;
};

// The terms of kAlibi, and by how many blocks the walk over the keys is turned (turned_blocks()).
class TurnedScores : public TermScores<terms_of(FwdForm::kAlibi)> {
 public:
  using TermScores::TermScores;

  __device__ __forceinline__ void turn(int blocks) { turned_ = blocks; }
  __device__ __forceinline__ int turned() const { return turned_; }

 private:
  int turned_;
};

// Softcap, and the coefficients of its polynomials, which a producer warp writes once a tile.
class SoftcapScores : public TermScores<terms_of(FwdForm::kSoftcap)> {
 public:
  template <typename Params>
  __device__ __forceinline__ SoftcapScores(const Params& params, int batch_idx, int head,
                                           int64_t diagonal)
      : TermScores(params, batch_idx, head, diagonal),
        first(cap(), inverse_scale(), params.softmax_scale),
        second(cap(), inverse_scale(), params.softmax_scale),
        mixed(cap(), inverse_scale(), params.softmax_scale) {}

  SoftcapPolynomial<1> first;
  SoftcapPolynomial<2> second;
  SoftcapPolynomial<6> mixed;
};

template <FwdForm kForm>
struct FwdScorePolicyOf {
  using Type =
      std::conditional_t<has_plain_scores(kForm), PlainScores, TermScores<terms_of(kForm)>>;
};
template <>
struct FwdScorePolicyOf<FwdForm::kMaxLogits> {
  using Type = RecordedScores;
};
template <>
struct FwdScorePolicyOf<FwdForm::kMasked> {
  using Type = BlockMask;
};
template <>
struct FwdScorePolicyOf<FwdForm::kAlibi> {
  using Type = TurnedScores;
};
template <>
struct FwdScorePolicyOf<FwdForm::kSoftcap> {
  using Type = SoftcapScores;
};
template <FwdForm kForm>
using FwdScorePolicy = typename FwdScorePolicyOf<kForm>::Type;

}  // namespace flash_attn::sm90
