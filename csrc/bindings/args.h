// The arguments of the ops as structs with named fields. The fields stand in the order of the
// schemas (bindings/library.cpp), so that an argument list and a struct turn into each other by
// unpacking: no function but the dispatcher's ever sees the long list.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "flash_attn.h"

namespace flash_attn {

using OptTensor = std::optional<at::Tensor>;
using OptName =
    std::optional<std::string_view>;  // a backend's name, or none: the best that serves the call

// core/params.h's DropoutPlace, as five numbers; none: the call is no part of a larger one.
using OptPlace = std::optional<std::vector<int64_t>>;

struct AttnArgs {
  at::Tensor q, k, v;
  OptTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table;
  OptTensor attn_bias, alibi_slopes, learnable_sink, rng_state;
  OptTensor mask_tiles, mask_rows, mask_labels;  // bindings/mask.h
  c10::SymInt max_seqlen_q, max_seqlen_k;
  double dropout_p;
  std::optional<double> softmax_scale;  // none: head_dim^-0.5
  bool causal;
  c10::SymInt window_left, window_right;
  bool top_left;
  double softcap;
  bool deterministic;

  template <class Self>
  static auto tied(Self& self) {
    return std::tie(self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q,
                    self.seqused_k, self.leftpad_k, self.block_table, self.attn_bias,
                    self.alibi_slopes, self.learnable_sink, self.rng_state, self.mask_tiles,
                    self.mask_rows, self.mask_labels, self.max_seqlen_q, self.max_seqlen_k,
                    self.dropout_p, self.softmax_scale, self.causal, self.window_left,
                    self.window_right, self.top_left, self.softcap, self.deterministic);
  }
  auto tie() { return tied(*this); }
  auto tie() const { return tied(*this); }
  bool is_varlen() const { return cu_seqlens_q.has_value(); }
};

struct FwdArgs {
  AttnArgs attn;
  bool return_probs, return_max_logits;
  OptPlace dropout_place;
  OptName backend;

  auto tie() {
    return std::tuple_cat(attn.tie(),
                          std::tie(return_probs, return_max_logits, dropout_place, backend));
  }
};
using FwdResult = std::tuple<at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor>;  // out, softmax_lse, S_dmask, max_logits

struct BwdArgs {
  at::Tensor dout;
  OptTensor dlse;
  at::Tensor out, softmax_lse;
  AttnArgs attn;
  std::array<bool, 5> grad_mask;  // q, k, v, attn_bias, learnable_sink
  OptPlace dropout_place;
  OptName backend;
  bool wide_key_gradients = false;   // dk and dv, of 16 bits else, are fp32
  bool wide_query_gradient = false;  // likewise dq

  auto tie() {
    return std::tuple_cat(
        std::tie(dout, dlse, out, softmax_lse), attn.tie(),
        std::tie(grad_mask, dropout_place, backend, wide_key_gradients, wide_query_gradient));
  }
};
using BwdResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor>;  // dq, dk, dv, dbias, dsink

struct DecodeArgs {
  at::Tensor q, k_cache, v_cache;
  OptTensor cache_seqlens, cache_batch_idx, leftpad_k, block_table;
  OptTensor alibi_slopes, learnable_sink, k_descale, v_descale;
  std::optional<double> softmax_scale;
  bool causal;
  c10::SymInt window_left, window_right;
  double softcap;
  int64_t num_splits;  // 0: chosen
  bool batch_invariant, return_max_logits;
  OptName backend;
  OptTensor prefix_source, prefix_lens;  // both or neither
  OptTensor attn_bias, tree_mask;        // at most one of them

  // Keys of one sequence that the cache has room for.
  c10::SymInt capacity() const {
    const c10::SymInt rows = k_cache.sym_size(1);  // of a page, with block_table
    return block_table ? block_table->sym_size(1) * rows : rows;
  }
  auto tie() {
    return std::tie(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, leftpad_k, block_table,
                    alibi_slopes, learnable_sink, k_descale, v_descale, softmax_scale, causal,
                    window_left, window_right, softcap, num_splits, batch_invariant,
                    return_max_logits, backend, prefix_source, prefix_lens, attn_bias, tree_mask);
  }
};

// Decode after an append: k and v go into the caches first, from cache_seqlens on.
struct KvcacheArgs {
  at::Tensor k, v;
  OptTensor rotary_cos, rotary_sin;
  bool rotary_interleaved;
  DecodeArgs decode;

  auto tie() {
    return std::tuple_cat(std::tie(k, v, rotary_cos, rotary_sin, rotary_interleaved), decode.tie());
  }
};
using DecodeResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // out, softmax_lse, max_logits

// How a field travels as an argument of a dispatcher function: tensors by reference, the rest by
// value.
template <class Field>
struct ArgumentOf {
  using type = Field;
};
template <>
struct ArgumentOf<at::Tensor> {
  using type = const at::Tensor&;
};
template <>
struct ArgumentOf<OptTensor> {
  using type = const OptTensor&;
};

// Unpacked<R, Args>: the long list of Args as a function type, and the two ways across.
template <class R, class Args, class Fields = decltype(std::declval<Args&>().tie())>
struct Unpacked;
template <class R, class Args, class... Field>
struct Unpacked<R, Args, std::tuple<Field&...>> {
  using Signature = R(typename ArgumentOf<Field>::type...);

  // kFunction(Args) as the function with the long list that the dispatcher registers; or, of other
  // arguments before it, kFunction(before…, Args).
  template <auto kFunction, class... Before>
  static R from_list(Before... before, typename ArgumentOf<Field>::type... field) {
    return kFunction(before..., Args{std::move(field)...});
  }
};
using Fwd = Unpacked<FwdResult, FwdArgs>;
using Bwd = Unpacked<BwdResult, BwdArgs>;
using Decode = Unpacked<DecodeResult, DecodeArgs>;
using Kvcache = Unpacked<DecodeResult, KvcacheArgs>;

// The ops, called through the dispatcher (typed handles; autograd, autocast and tracing see them).
FLASH_ATTN_API FwdResult call_fwd(FwdArgs args);
FLASH_ATTN_API BwdResult call_bwd(BwdArgs args);
FLASH_ATTN_API DecodeResult call_decode(DecodeArgs args);
FLASH_ATTN_API DecodeResult call_kvcache(KvcacheArgs args);
FLASH_ATTN_API at::Tensor call_rng_state(const at::Tensor& like);
// packed.unbind(-3), whose gradient is not copied where those of the results lie side by side
// (bindings/unpack.h).
FLASH_ATTN_API std::vector<at::Tensor> call_unpack(const at::Tensor& packed);
// The op fwd, of which out alone is wanted, of ordinary tensors with nothing to cast or transform;
// none: the call is not of that kind. As torch's scaled_dot_product_attention, (batch, heads, rows,
// d) with nothing to broadcast; and of (batch, rows, heads, d).
FLASH_ATTN_API OptTensor call_heads_first(at::Tensor query, at::Tensor key, at::Tensor value,
                                          OptTensor mask, double dropout_p,
                                          std::optional<double> scale, bool causal, bool gqa,
                                          OptName backend);
FLASH_ATTN_API OptTensor call_rows_first(at::Tensor q, at::Tensor k, at::Tensor v,
                                         OptTensor attn_bias, double dropout_p,
                                         std::optional<double> softmax_scale, bool causal,
                                         int64_t window_left, int64_t window_right, bool top_left,
                                         double softcap, bool deterministic, OptName backend);

// The backend that serves a call; every other one with its reasons why not; of each that can, how.
using Explanation = std::tuple<std::string, std::map<std::string, std::vector<std::string>>,
                               std::map<std::string, std::string>>;
FLASH_ATTN_API Explanation explain_fwd(const FwdArgs& args);
FLASH_ATTN_API Explanation explain_bwd(const FwdArgs& args);  // of the backward that would follow
FLASH_ATTN_API Explanation explain_decode(const DecodeArgs& args);
FLASH_ATTN_API std::vector<std::string> backend_names();

// On a GPU, of contiguous tensors (batch, max_pages, …): zeros in the pages of k and v that bool
// (batch, max_pages) says are missing. No op: of copies that nobody else has.
FLASH_ATTN_API void clear_pages(const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& missing);

// Whether sm90's kernels, or decode's, serve a call with a block_table as it is; for any other, the
// pages are copied side by side first (flash_attn/_pages.py).
FLASH_ATTN_API bool reads_pages(const FwdArgs& args);

// The ops' bodies, below autograd: check → device guard → allocate → fill params → launch on the
// current stream.
FwdResult fwd(const FwdArgs& args);
FwdResult fwd_wanted(const FwdArgs& args);  // what is not asked for may be undefined
BwdResult bwd(const BwdArgs& args);
// The same, with the last `packed` (0, 2 or 3) of dq, dk and dv side by side: views along dimension
// -3 of one tensor that nobody else has. What they belong to has one shape, and they are wanted and
// not wide. No body of an op, whose results share no memory.
BwdResult bwd_packed(const BwdArgs& args, int packed);
DecodeResult decode(const DecodeArgs& args);
DecodeResult kvcache(const KvcacheArgs& args);
at::Tensor rng_state(const at::Tensor& like);

}  // namespace flash_attn
