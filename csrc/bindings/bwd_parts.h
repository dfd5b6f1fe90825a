// The backward of queries whose keys come part by part, call after call, as in a ring of ranks.
#pragma once

#include <optional>
#include <tuple>

#include "../core/params.h"
#include "args.h"

namespace flash_attn {

// delta is computed once, and the sums of dq stay where the kernels add to them until store().
class FLASH_ATTN_API BwdParts {
 public:
  using KeyGradients = std::tuple<at::Tensor, at::Tensor>;  // dk, dv

  // Of all queries and all keys: dout and out (batch, seqlen_q, heads_q, head_dim_v), softmax_lse
  // and dlse (batch, heads_q, seqlen_q).
  BwdParts(at::Tensor dout, OptTensor dlse, at::Tensor out, at::Tensor softmax_lse);

  // Adds to dq what the keys of a call contribute to its queries, which lie from first_row on in
  // those of the constructor. Returns their dk and dv, in fp32. None: the call's kernels have no
  // sums that fit those of the calls before, and nothing happened.
  std::optional<KeyGradients> add(int64_t first_row, BwdArgs args);

  // Whether add() has added anything.
  bool has_sums() const { return sums_.defined(); }
  // Writes dq (batch, seqlen_q, heads_q, head_dim), of q's dtype or fp32: 0 where nothing was added.
  void store(const at::Tensor& dq) const;

 private:
  bool fits(const BwdParams& part, bool by_sm90, int cols) const;
  void start(const BwdParams& part, bool by_sm90, int cols);

  at::Tensor dout_, out_, lse_;
  OptTensor dlse_;
  at::Tensor delta_, sums_;  // undefined before the first part
  BwdParams whole_;          // what a call of all queries has in common with its parts
  bool by_sm90_ = false;
};

// add() with the arguments of the op bwd one by one.
FLASH_ATTN_API std::optional<BwdParts::KeyGradients> add_part(BwdParts& parts, int64_t first_row,
                                                              BwdArgs args);

}  // namespace flash_attn
