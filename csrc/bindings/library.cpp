// The ops' schemas: arguments are added, each with a meaning of its own, and none ever changes
// what it means. The fields of bindings/args.h stand in the same order. Upstream's own op
// names (_flash_attn_forward, …) stay free.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "args.h"

namespace flash_attn {
namespace {

template <class Unpacked>
using SignatureOf = typename Unpacked::Signature;

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Calls the op with the fields of `args` as its arguments.
template <class Handle, class Args>
auto call(const Handle& op, Args& args) {
  return std::apply([&](auto&... field) { return op.call(field...); }, args.tie());
}

}  // namespace

FwdResult call_fwd(FwdArgs args) {
  static const auto op = find_op<SignatureOf<Fwd>>("flash_attn::fwd");
  return call(op, args);
}

BwdResult call_bwd(BwdArgs args) {
  static const auto op = find_op<SignatureOf<Bwd>>("flash_attn::bwd");
  return call(op, args);
}

DecodeResult call_decode(DecodeArgs args) {
  static const auto op = find_op<SignatureOf<Decode>>("flash_attn::decode");
  return call(op, args);
}

DecodeResult call_kvcache(KvcacheArgs args) {
  static const auto op = find_op<SignatureOf<Kvcache>>("flash_attn::kvcache");
  return call(op, args);
}

at::Tensor call_rng_state(const at::Tensor& like) {
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("flash_attn::rng_state");
  return op.call(like);
}

}  // namespace flash_attn

TORCH_LIBRARY(flash_attn, library) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  library.def(
      "fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
      "seqused_q, "
      "Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, Tensor? attn_bias, Tensor? "
      "alibi_slopes, "
      "Tensor? learnable_sink, Tensor? rng_state, Tensor? mask_tiles, Tensor? mask_rows, Tensor? "
      "mask_labels, SymInt max_seqlen_q, SymInt max_seqlen_k, float "
      "dropout_p, "
      "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, bool top_left, "
      "float softcap, "
      "bool deterministic, bool return_probs, bool return_max_logits=False, int[]? "
      "dropout_place=None, str? backend=None) -> "
      "(Tensor out, Tensor softmax_lse, Tensor S_dmask, Tensor max_logits)",
      tags);
  library.def(
      "bwd(Tensor dout, Tensor? dlse, Tensor out, Tensor softmax_lse, Tensor q, Tensor k, Tensor "
      "v, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? "
      "leftpad_k, "
      "Tensor? block_table, Tensor? attn_bias, Tensor? alibi_slopes, Tensor? learnable_sink, "
      "Tensor? rng_state, Tensor? mask_tiles, Tensor? mask_rows, Tensor? mask_labels, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float? softmax_scale, bool "
      "causal, "
      "SymInt window_left, SymInt window_right, bool top_left, float softcap, bool deterministic, "
      "bool[5] grad_mask, int[]? dropout_place=None, "
      "str? backend=None, bool wide_key_gradients=False, bool wide_query_gradient=False) -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
      tags);
  const std::string decode_rest =
      "Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? leftpad_k, Tensor? block_table, "
      "Tensor? alibi_slopes, Tensor? learnable_sink, Tensor? k_descale, Tensor? v_descale, float? "
      "softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap, int "
      "num_splits, bool batch_invariant, bool return_max_logits=False, str? backend=None, Tensor? "
      "prefix_source=None, Tensor? prefix_lens=None, Tensor? attn_bias=None, Tensor? "
      "tree_mask=None) -> "
      "(Tensor out, Tensor softmax_lse, Tensor max_logits)";
  library.def(("decode(Tensor q, Tensor k_cache, Tensor v_cache, " + decode_rest).c_str(), tags);
  library.def(("kvcache(Tensor k, Tensor v, Tensor? rotary_cos, Tensor? rotary_sin, bool "
               "rotary_interleaved, Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, " +
               decode_rest)
                  .c_str(),
              tags);
  library.def("rng_state(Tensor like) -> Tensor",
              {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
}

// One body for every device: core/backend.cpp decides what runs.
TORCH_LIBRARY_IMPL(flash_attn, CompositeExplicitAutograd, library) {
  using namespace flash_attn;
  library.impl("fwd", TORCH_FN(&Fwd::from_list<&fwd>));
  library.impl("bwd", TORCH_FN(&Bwd::from_list<&bwd>));
  library.impl("decode", TORCH_FN(&Decode::from_list<&decode>));
  library.impl("kvcache", TORCH_FN(&Kvcache::from_list<&kvcache>));
  library.impl("rng_state", TORCH_FN(&rng_state));
}

// The same body under vmap: its draw then follows vmap's `randomness`, as torch's own dropout does.
TORCH_LIBRARY_IMPL(flash_attn, FuncTorchVmapMode, library) {
  library.impl("rng_state", TORCH_FN(&flash_attn::rng_state));
}
