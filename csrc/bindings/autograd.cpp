// What autograd, functorch and views mean to the ops. The gradient formula is bindings/graph.cpp.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "graph.h"
#include "to_params.h"

namespace flash_attn {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

// Forward-mode AD has no formula here, and a tangent that nobody looks at would be a silent zero.
void check_no_tangent(const char* name, const OptTensor& input) {
  TORCH_CHECK_NOT_IMPLEMENTED(!input || !input->_fw_grad(/*level=*/0).defined(),
                              "flash_attn: ", name,
                              ": forward-mode AD is not implemented, expected a tensor without a "
                              "tangent, got one with");
}

bool needs_graph(const AttnArgs& attn) {
  const auto wants_grad = [](const OptTensor& input) { return input && input->requires_grad(); };
  return at::GradMode::is_enabled() &&
         (attn.q.requires_grad() || attn.k.requires_grad() || attn.v.requires_grad() ||
          wants_grad(attn.attn_bias) || wants_grad(attn.learnable_sink));
}

FwdResult fwd_autograd(const FwdArgs& args) {
  const AttnArgs& attn = args.attn;
  check_no_tangent("q", attn.q);
  check_no_tangent("k", attn.k);
  check_no_tangent("v", attn.v);
  check_no_tangent("attn_bias", attn.attn_bias);
  check_no_tangent("alibi_slopes", attn.alibi_slopes);
  check_no_tangent("learnable_sink", attn.learnable_sink);
  if (!needs_graph(attn)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_fwd(args);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!attn.block_table,
                              "flash_attn: block_table: expected tensors that need no gradient, "
                              "got one that does (flash_attn_varlen_func copies the pages first)");
  // A backend that was named has to serve the backward too: better refused here than in the middle
  // of it.
  if (args.backend) select_backend(backward_shape(args), args.backend);
  return fwd_in_graph(args, Wanted::kAll);
}

bool is_cast_by_autocast(const Tensor& x) {
  const at::DeviceType device = x.device().type();
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
}

bool are_ordinary(const AttnArgs& attn) {
  return attn.q.dim() == 4 && attn.k.dim() == 4 && attn.v.dim() == 4 &&
         !is_cast_by_autocast(attn.q) && is_ordinary(attn.q) && is_ordinary(attn.k) &&
         is_ordinary(attn.v) && (!attn.attn_bias || is_ordinary(*attn.attn_bias));
}

// The op fwd of tensors that are ordinary, of which out alone is wanted: the dispatcher has nothing
// to do above autograd.
Tensor out_of(FwdArgs args, bool heads_first) {
  AttnArgs& attn = args.attn;
  const int rows = heads_first ? 2 : 1;
  attn.max_seqlen_q = attn.q.size(rows);
  attn.max_seqlen_k = attn.k.size(rows);
  if (attn.dropout_p > 0.0) attn.rng_state = call_rng_state(attn.q);
  if (needs_graph(attn)) {
    if (args.backend) {
      select_backend(backward_shape(heads_first ? turned(args) : args), args.backend);
    }
    return std::get<0>(fwd_in_graph(args, heads_first ? Wanted::kOutHeadsFirst : Wanted::kOut));
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!heads_first) return std::get<0>(fwd_of_ordinary(std::move(args)));
  return turned(std::get<0>(fwd_of_ordinary(turned(std::move(args)))));
}

}  // namespace

bool is_ordinary(const Tensor& x) {
  const c10::DispatchKeySet keys = x.key_set() -
                                   c10::autograd_dispatch_keyset_with_ADInplaceOrView -
                                   c10::autocast_dispatch_keyset;
  const c10::DispatchKeySet rest = keys - c10::DispatchKeySet(c10::DispatchKey::Dense);
  return keys.highestFunctionalityKey() == c10::DispatchKey::Dense &&
         rest.highestFunctionalityKey() == c10::DispatchKey::Undefined &&
         !x._fw_grad(/*level=*/0).defined();
}

OptTensor call_heads_first(Tensor query, Tensor key, Tensor value, OptTensor mask, double dropout_p,
                           std::optional<double> scale, bool causal, bool gqa, OptName backend) {
  FwdArgs args{.attn = {.q = std::move(query),
                        .k = std::move(key),
                        .v = std::move(value),
                        .attn_bias = std::move(mask),
                        .dropout_p = dropout_p,
                        .softmax_scale = scale,
                        .causal = causal,
                        .window_left = -1,
                        .window_right = -1,
                        .top_left = true,
                        .softcap = 0.0,
                        .deterministic = false},
               .return_probs = false,
               .return_max_logits = false,
               .backend = backend};
  const auto& [q, k, v] = std::tie(args.attn.q, args.attn.k, args.attn.v);
  if (!are_ordinary(args.attn) || q.size(0) != k.size(0) || q.size(0) != v.size(0) ||
      k.size(1) != v.size(1) || (!gqa && q.size(1) != k.size(1)) || (scale && *scale <= 0)) {
    return std::nullopt;
  }
  return out_of(std::move(args), true);
}

OptTensor call_rows_first(Tensor q, Tensor k, Tensor v, OptTensor attn_bias, double dropout_p,
                          std::optional<double> softmax_scale, bool causal, int64_t window_left,
                          int64_t window_right, bool top_left, double softcap, bool deterministic,
                          OptName backend) {
  FwdArgs args{.attn = {.q = std::move(q),
                        .k = std::move(k),
                        .v = std::move(v),
                        .attn_bias = std::move(attn_bias),
                        .dropout_p = dropout_p,
                        .softmax_scale = softmax_scale,
                        .causal = causal,
                        .window_left = window_left,
                        .window_right = window_right,
                        .top_left = top_left,
                        .softcap = softcap,
                        .deterministic = deterministic},
               .return_probs = false,
               .return_max_logits = false,
               .backend = backend};
  if (!are_ordinary(args.attn)) return std::nullopt;
  return out_of(std::move(args), false);
}

namespace {

void check_no_tangents(const DecodeArgs& args) {
  check_no_tangent("q", args.q);
  check_no_tangent("k_cache", args.k_cache);
  check_no_tangent("v_cache", args.v_cache);
  check_no_tangent("attn_bias", args.attn_bias);
  check_no_tangent("alibi_slopes", args.alibi_slopes);
  check_no_tangent("learnable_sink", args.learnable_sink);
  check_no_tangent("k_descale", args.k_descale);
  check_no_tangent("v_descale", args.v_descale);
}

// The caches are changed in place and have no gradient; nor have out and LSE, which raise in the
// backward pass.
struct KvcacheBackward : torch::autograd::Node {
  using Node::Node;
  std::string name() const override { return "FlashAttentionKvcacheBackward"; }
  variable_list apply(variable_list&&) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "flash_attn: flash_attn_with_kvcache has no gradient, expected "
                                "inputs with requires_grad=False or torch.no_grad()");
  }
};

DecodeResult kvcache_autograd(const KvcacheArgs& args) {
  const auto check_no_grad = [](const char* name, const Tensor& cache) {
    TORCH_CHECK(!(at::GradMode::is_enabled() && cache.requires_grad()), "flash_attn: ", name,
                ": expected requires_grad=False, as it is updated in place, got True");
  };
  check_no_grad("k_cache", args.decode.k_cache);
  check_no_grad("v_cache", args.decode.v_cache);
  check_no_tangent("k", args.k);
  check_no_tangent("v", args.v);
  check_no_tangent("rotary_cos", args.rotary_cos);
  check_no_tangent("rotary_sin", args.rotary_sin);
  check_no_tangents(args.decode);
  check_no_transform();
  DecodeResult results = [&] {
    const at::AutoDispatchBelowAutograd below_autograd;
    return call_kvcache(args);
  }();
  const Tensor& q = args.decode.q;
  const OptTensor& bias = args.decode.attn_bias;
  if (torch::autograd::compute_requires_grad(q, args.k, args.v, bias)) {
    const std::shared_ptr<KvcacheBackward> node(
        new KvcacheBackward(torch::autograd::collect_next_edges(q, args.k, args.v, bias)),
        torch::autograd::deleteNode);
    torch::autograd::set_history(std::get<0>(results), node);
    torch::autograd::set_history(std::get<1>(results), node);
  }
  return results;
}

// The write counts as a new version of the caches: whoever saved one for a backward pass hears of
// it. Tensors of inference mode have no version, and by torch's rule nobody writes to them outside
// of it.
DecodeResult kvcache_in_place(const KvcacheArgs& args) {
  const auto check_version = [](const char* name, const Tensor& cache) {
    TORCH_CHECK(!cache.is_inference() || c10::InferenceMode::is_enabled(), "flash_attn: ", name,
                ": expected a tensor made outside of inference mode, as it is updated in place "
                "outside of it, got one made inside");
  };
  check_version("k_cache", args.decode.k_cache);
  check_version("v_cache", args.decode.v_cache);
  DecodeResult result = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_kvcache(args);
  }();
  for (const Tensor* cache : {&args.decode.k_cache, &args.decode.v_cache}) {
    if (!cache->is_inference()) torch::autograd::impl::bump_version(*cache);
  }
  return result;
}

// Negated and conjugated views, whose sign changes on reading. Inputs are copied; torch's own
// fallback would copy the caches, too, and lose what is written.
DecodeResult kvcache_resolved(const KvcacheArgs& outer) {
  const auto check_plain = [](const char* name, const Tensor& cache) {
    TORCH_CHECK(!cache.is_neg() && !cache.is_conj(), "flash_attn: ", name,
                ": expected no negated or conjugated view, as it is updated in place, got one");
  };
  check_plain("k_cache", outer.decode.k_cache);
  check_plain("v_cache", outer.decode.v_cache);
  KvcacheArgs args = outer;
  const auto resolve = [](auto& field) {
    if constexpr (std::is_same_v<decltype(field), Tensor&>) {
      field = field.resolve_conj().resolve_neg();
    } else if constexpr (std::is_same_v<decltype(field), OptTensor&>) {
      if (field) field = field->resolve_conj().resolve_neg();
    }
  };
  std::apply([&](auto&... field) { (resolve(field), ...); }, args.tie());
  return call_kvcache(std::move(args));
}

}  // namespace
}  // namespace flash_attn

TORCH_LIBRARY_IMPL(flash_attn, Autograd, library) {
  using namespace flash_attn;
  library.impl("fwd", TORCH_FN(&Fwd::from_list<&fwd_autograd>));
  // No formula: differentiating through these (twice, or through decode) raises in the backward
  // pass.
  library.impl("bwd", torch::autograd::autogradNotImplementedFallback());
  library.impl("decode", torch::autograd::autogradNotImplementedFallback());
  library.impl("kvcache", TORCH_FN(&Kvcache::from_list<&kvcache_autograd>));
}

TORCH_LIBRARY_IMPL(flash_attn, ADInplaceOrView, library) {
  using namespace flash_attn;
  library.impl("kvcache", TORCH_FN(&Kvcache::from_list<&kvcache_in_place>));
}

TORCH_LIBRARY_IMPL(flash_attn, Negative, library) {
  using namespace flash_attn;
  library.impl("kvcache", TORCH_FN(&Kvcache::from_list<&kvcache_resolved>));
}

TORCH_LIBRARY_IMPL(flash_attn, Conjugate, library) {
  using namespace flash_attn;
  library.impl("kvcache", TORCH_FN(&Kvcache::from_list<&kvcache_resolved>));
}
