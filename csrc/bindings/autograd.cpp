// The gradient formula: forward saves its inputs, out and LSE; backward is one call of the op bwd.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "to_params.h"

namespace flash_attn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Takes AttnArgs apart into tensors (saved as variables) and plain values, and puts them together
// again.
struct SavedArgs {
  variable_list tensors;
  std::vector<c10::IValue> values;

  void put(const Tensor& tensor) { tensors.push_back(tensor); }
  void put(const OptTensor& tensor) { tensors.push_back(tensor.value_or(Tensor())); }
  template <class Value>
  void put(const Value& plain) {
    values.emplace_back(plain);
  }
};

class Restore {
 public:
  Restore(variable_list::const_iterator tensor, c10::ArrayRef<c10::IValue> values)
      : tensor_(tensor), value_(values.begin()) {}
  void get(Tensor& tensor) { tensor = *tensor_++; }
  void get(OptTensor& tensor) {
    if (tensor_->defined()) tensor = *tensor_;
    ++tensor_;
  }
  void get(c10::SymInt& number) { number = (value_++)->toSymInt(); }
  void get(std::optional<double>& number) { number = (value_++)->toOptional<double>(); }
  template <class Value>
  void get(Value& plain) {
    plain = (value_++)->to<Value>();
  }

 private:
  variable_list::const_iterator tensor_;
  const c10::IValue* value_;
};

// (batch, heads, rows, d) and (batch, rows, heads, d), into one another.
Tensor turned(const Tensor& x) { return x.transpose(1, 2); }

void turn(AttnArgs& attn) {
  for (Tensor* x : {&attn.q, &attn.k, &attn.v}) *x = turned(*x);
}

FwdArgs turned(FwdArgs args) {
  turn(args.attn);
  return args;
}

// What a graph gives: all results of the op; out alone; out alone of (batch, heads, rows, d), as q, k
// and v are: turned in the function, they cost no nodes of the graph.
enum class Wanted : int64_t { kAll, kOut, kOutHeadsFirst };

class Attention : public torch::autograd::Function<Attention> {
 public:
  // The differentiable inputs come as arguments of their own, so that autograd sees them; `args`
  // holds them too.
  static variable_list forward(AutogradContext* ctx, const Tensor& /*q*/, const Tensor& /*k*/,
                               const Tensor& /*v*/, const OptTensor& /*attn_bias*/,
                               const OptTensor& /*learnable_sink*/, const FwdArgs& args,
                               Wanted wanted) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const bool heads_first = wanted == Wanted::kOutHeadsFirst;
    auto [out, softmax_lse, probs, max_logits] = call_fwd(heads_first ? turned(args) : args);

    // The inputs as they came: a view made here would not hear of a write to what it views.
    SavedArgs saved;
    saved.put(out);
    saved.put(softmax_lse);
    std::apply([&](const auto&... field) { (saved.put(field), ...); }, args.attn.tie());
    saved.values.emplace_back(args.backend ? c10::IValue(std::string(*args.backend))
                                           : c10::IValue());
    saved.values.emplace_back(args.dropout_place);
    saved.values.emplace_back(static_cast<int64_t>(wanted));
    ctx->save_for_backward(std::move(saved.tensors));
    ctx->saved_data["values"] = c10::ivalue::Tuple::create(std::move(saved.values));
    ctx->set_materialize_grads(false);
    if (heads_first) {
      const Tensor result = turned(out);
      // Who writes to the result writes to the out that is saved, and the backward has to hear of it.
      torch::autograd::impl::set_version_counter(result,
                                                 torch::autograd::impl::version_counter(out));
      return {result};
    }
    if (wanted == Wanted::kOut) return {out};
    ctx->mark_non_differentiable({probs, max_logits});
    return {out, softmax_lse, probs, max_logits};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list tensors = ctx->get_saved_variables();
    const auto values = ctx->saved_data["values"].toTuple();
    const auto& elements = values->elements();
    BwdArgs args;
    args.out = tensors[0];
    args.softmax_lse = tensors[1];
    Restore restore(tensors.begin() + 2, elements);
    std::apply([&](auto&... field) { (restore.get(field), ...); }, args.attn.tie());
    const c10::IValue& backend = elements[elements.size() - 3];
    if (!backend.isNone()) args.backend = backend.toStringView();
    args.dropout_place = elements[elements.size() - 2].to<OptPlace>();
    const auto given = static_cast<Wanted>(elements[elements.size() - 1].toInt());
    const bool heads_first = given == Wanted::kOutHeadsFirst;

    if (!grads[0].defined()) {
      args.dout = at::zeros_like(args.out);
    } else {
      args.dout = heads_first ? turned(grads[0]) : grads[0];
    }
    if (heads_first) turn(args.attn);
    if (given == Wanted::kAll && grads[1].defined()) args.dlse = grads[1];
    // Autograd numbers only the inputs that are there.
    const std::array<bool, 5> present = {true, true, true, args.attn.attn_bias.has_value(),
                                         args.attn.learnable_sink.has_value()};
    size_t edge = 0;
    for (size_t i = 0; i < present.size(); ++i)
      args.grad_mask[i] = present[i] && ctx->needs_input_grad(edge++);
    const auto grad_mask = args.grad_mask;
    auto [dq, dk, dv, dbias, dsink] = call_bwd(std::move(args));
    if (heads_first) {
      for (Tensor* gradient : {&dq, &dk, &dv}) *gradient = turned(*gradient);
    }
    const auto if_wanted = [&](int which, const Tensor& gradient) {
      return grad_mask[which] ? gradient : Tensor();
    };
    return {if_wanted(0, dq),    if_wanted(1, dk), if_wanted(2, dv), if_wanted(3, dbias),
            if_wanted(4, dsink), Tensor(),         Tensor()};
  }
};

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
  // A backend that was named has to serve the backward too: better refused here than in the middle
  // of it.
  if (args.backend) select_backend(backward_shape(args), args.backend);
  const variable_list results = Attention::apply(attn.q, attn.k, attn.v, attn.attn_bias,
                                                 attn.learnable_sink, args, Wanted::kAll);
  return {results[0], results[1], results[2], results[3]};
}

// A tensor of a device's own kernels, with nothing between them and autograd: no subclass, no view
// that is negated on reading, no nested or transformed tensor, no tangent.
bool is_ordinary(const Tensor& x) {
  const c10::DispatchKeySet keys = x.key_set() -
                                   c10::autograd_dispatch_keyset_with_ADInplaceOrView -
                                   c10::autocast_dispatch_keyset;
  const c10::DispatchKeySet rest = keys - c10::DispatchKeySet(c10::DispatchKey::Dense);
  return keys.highestFunctionalityKey() == c10::DispatchKey::Dense &&
         rest.highestFunctionalityKey() == c10::DispatchKey::Undefined &&
         !x._fw_grad(/*level=*/0).defined();
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

// The op fwd of tensors that are ordinary, of which out alone is wanted: the dispatcher has nothing to
// do above autograd.
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
    return Attention::apply(attn.q, attn.k, attn.v, attn.attn_bias, attn.learnable_sink, args,
                            heads_first ? Wanted::kOutHeadsFirst : Wanted::kOut)[0];
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!heads_first) return std::get<0>(call_fwd(std::move(args)));
  turn(attn);
  return turned(std::get<0>(call_fwd(std::move(args))));
}

}  // namespace

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
  check_no_tangent("alibi_slopes", args.alibi_slopes);
  check_no_tangent("learnable_sink", args.learnable_sink);
  check_no_tangent("k_descale", args.k_descale);
  check_no_tangent("v_descale", args.v_descale);
}

// The caches are changed in place and have no gradient; nor have out and LSE, which raise in the
// backward pass.
class NotDifferentiable : public torch::autograd::Function<NotDifferentiable> {
 public:
  static variable_list forward(AutogradContext*, const Tensor& /*q*/, const Tensor& /*k*/,
                               const Tensor& /*v*/, KvcacheArgs args) {
    const at::AutoDispatchBelowAutograd below_autograd;
    auto [out, softmax_lse, max_logits] = call_kvcache(std::move(args));
    return {out, softmax_lse, max_logits};
  }
  static variable_list backward(AutogradContext*, variable_list) {
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
  const variable_list results = NotDifferentiable::apply(args.decode.q, args.k, args.v, args);
  return {results[0], results[1], results[2]};
}

// The write counts as a new version of the caches: whoever saved one for a backward pass hears of it.
// Tensors of inference mode have no version, and by torch's rule nobody writes to them outside of it.
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

// Negated and conjugated views, whose sign changes on reading. Inputs are copied; torch's own fallback
// would copy the caches, too, and lose what is written.
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
