// Which backend serves a call, and why the others do not. The one place that decides.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "params.h"

namespace flash_attn {

enum class Backend : uint8_t { kSm90, kSm80, kCuda, kAten };  // best first
inline constexpr Backend kBackends[] = {Backend::kSm90, Backend::kSm80, Backend::kCuda,
                                        Backend::kAten};

enum class Op : uint8_t { kForward, kBackward, kDecode };

// All that the choice depends on.
struct CallShape {
  Op op;
  bool on_cuda;
  int compute_capability;  // 10 · major + minor; 0 off CUDA
  int num_sms;             // 0 off CUDA
  DType dtype;
  int64_t head_dim, head_dim_v;
  bool bias, alibi, softcap, dropout, sink, return_probs;
  // Decode only.
  DType cache_dtype;
  int64_t batch, tokens, heads_q, heads_kv;
  int64_t capacity;  // keys of a sequence that the cache has room for
  int64_t num_splits;
  bool paged, batch_invariant;
};

std::string_view name(Backend backend);
// Throws std::invalid_argument that lists the names.
Backend backend_from_name(std::string_view name);

// Every reason why `backend` cannot serve the call; empty: it can.
std::vector<std::string> why_not(Backend backend, const CallShape& call);

// Of a decode call that sm90 serves: pieces that each tile's keys are cut into, as there are fewer
// tiles than multiprocessors; 1: not cut.
int prefill_splits(const CallShape& call);

// The first backend that serves the call; the one named, if any, or std::invalid_argument with its
// reasons.
Backend choose_backend(const CallShape& call, std::optional<std::string_view> forced);

std::string join(const std::vector<std::string>& parts, std::string_view separator);

}  // namespace flash_attn
