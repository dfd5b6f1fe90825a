// Chooses a compiled instance by the dtype and head dim that are known at run time.
#pragma once

#include "../core/failure.h"
#include "../core/params.h"

namespace flash_attn::cuda {

// Calls f.template operator()<dtype>().
template <typename F>
auto with_dtype(DType dtype, F&& f) {
  if (dtype == DType::kFp16) return f.template operator()<DType::kFp16>();
  if (dtype == DType::kBf16) return f.template operator()<DType::kBf16>();
  refuse({"flash_attn: dtype: expected fp16 or bf16 for a CUDA kernel"});
}

// The same of new tokens against a cache, which may be of fp32.
template <typename F>
auto with_cache_dtype(DType dtype, F&& f) {
  if (dtype == DType::kFp32) return f.template operator()<DType::kFp32>();
  return with_dtype(dtype, f);
}

// fp32 in memory.
inline bool is_wide(DType dtype) { return dtype == DType::kFp32 || dtype == DType::kTf32; }

// with_dtype() of those.
template <typename F>
auto with_wide_dtype(DType dtype, F&& f) {
  return dtype == DType::kTf32 ? f.template operator()<DType::kTf32>()
                               : f.template operator()<DType::kFp32>();
}

// Calls f.template operator()<class>() with the least head-dim class that holds head_dim. Columns
// beyond head_dim are zeros in shared memory.
template <typename F>
auto with_head_dim_class(int head_dim, F&& f) {
  if (head_dim <= 64) return f.template operator()<64>();
  if (head_dim <= 96) return f.template operator()<96>();
  if (head_dim <= 128) return f.template operator()<128>();
  if (head_dim <= 192) return f.template operator()<192>();
  if (head_dim <= 256) return f.template operator()<256>();
  refuse({"flash_attn: head_dim: expected at most 256, got ", head_dim});
}

// The same among the classes of the kernels with score terms, and of those of fp32: three, for the
// time of the build.
template <typename F>
auto with_scores_class(int head_dim, int head_dim_v, F&& f) {
  const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (widest <= 64) return f.template operator()<64>();
  if (widest <= 128) return f.template operator()<128>();
  return f.template operator()<256>();
}

// Of FwdParams or BwdParams: more than PlainScores does. A sink is no more.
template <typename Params>
bool has_score_terms(const Params& params) {
  const ScoreParams& score = params.score;
  return score.softcap != 0 || score.alibi_slopes != nullptr || score.bias.data != nullptr ||
         params.dropout.rng_state != nullptr;
}

}  // namespace flash_attn::cuda
