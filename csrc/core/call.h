// What the choice of a backend depends on: the form of a call, without its tensors.
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <vector>

#include "architectures.h"
#include "device.h"
#include "params.h"

namespace flash_attn {

// a / b, rounded up.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Op : uint8_t { kForward, kBackward, kDecode };

struct CallShape {
  Op op;
  const DeviceInfo* device = nullptr;  // null: not on CUDA
  const Architectures* compiled = &compiled_architectures();

  DType dtype = DType::kFp16;
  int64_t head_dim = 0, head_dim_v = 0;
  bool bias = false, alibi = false, softcap = false, dropout = false, sink = false;
  bool dense_bias = false;  // a bias of q's dtype, or a mask of the keys alone; and no varlen call
  bool tile_mask = false;   // a mask of tiles; bias is true too, as which it can be read
  bool bool_mask = false;   // the bias hides keys and adds nothing; of tile_mask too
  bool ragged = false;      // varlen, or seqused or leftpad; of decode: leftpad
  bool gathers = false;     // of decode: varlen, whose queries decode's kernels need side by side
  bool paged = false;       // of decode, and of a forward that reads pages in place
  bool odd_pages = false;   // of decode: the keys of a page are no multiple of eight
  bool return_probs = false, max_logits = false;
  bool deterministic = false, bias_gradient = false;  // backward only
  bool bias_of_keys = false;  // one number for all queries, and not for all keys

  DType cache_dtype = DType::kFp16;  // decode only
  // Decode, and a varlen forward whose keys may be cut: as one sequence of as many tokens as its
  // tiles have room for.
  int64_t batch = 0, tokens = 0, heads_q = 0, heads_kv = 0;
  int64_t capacity = 0;  // keys of a sequence that the cache has room for
  int64_t longest = 0;   // keys of the longest one, as the caller says, or 0
  int64_t window_left = -1;
  // Of a varlen call with short sequences beside long ones, by a guess from the totals: how many of
  // both there are, with how many tokens each. Either a list has the tiles of all, or decode serves
  // the short ones, for decode_time in µs, beside the forward, or the forward serves all.
  int64_t short_sequences = 0, short_tokens = 0, long_sequences = 0, long_tokens = 0;
  double decode_time = 0;
  bool lists_tiles = false;  // tiles are counted by these lengths, not by batch and tokens

  int64_t guessed_sequences() const { return short_sequences + long_sequences; }
  int64_t guessed_tokens() const {
    return short_sequences * short_tokens + long_sequences * long_tokens;
  }

  // Decode only.
  int64_t num_splits = 0;
  bool batch_invariant = false;
  bool appends = false;         // tokens to the cache, before
  bool rotates = false;         // and the queries
  bool values_in_keys = false;  // values are the first columns of their keys, in memory once
  // Sequences share leading pages, and none has a leftpad.
  bool shares_prefix = false;

  bool operator==(const CallShape&) const = default;

  // The architecture of the portable code that the device runs; 0: this build has none for it.
  int portable_code() const {
    return device == nullptr ? 0 : compiled->code_for(device->compute_capability);
  }
};

// Why something cannot serve a call, in words; empty: it can. Every call asks all who could serve
// it, and hardly any asks why: Reasons without words only know whether there are any.
class Reasons {
 public:
  explicit Reasons(bool in_words = true) : in_words_(in_words) {}

  // reason: words, or what puts them together.
  template <typename Reason>
  void refuse_if(bool refused, const Reason& reason) {
    if (!refused) return;
    empty_ = false;
    if (!in_words_) return;
    if constexpr (std::invocable<Reason>) {
      reasons_.emplace_back(reason());
    } else {
      reasons_.emplace_back(reason);
    }
  }
  bool empty() const { return empty_; }
  std::vector<std::string> take() && { return std::move(reasons_); }

 private:
  bool in_words_, empty_ = true;
  std::vector<std::string> reasons_;
};

}  // namespace flash_attn
