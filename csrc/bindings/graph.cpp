#include "graph.h"

#include <ATen/FuncTorchTLS.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "unpack.h"

namespace flash_attn {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

Tensor turned(const Tensor& x) { return x.transpose(1, 2); }

namespace {

void turn(AttnArgs& attn) {
  for (Tensor* x : {&attn.q, &attn.k, &attn.v}) *x = turned(*x);
}

// Runs `work` so that its views have no history where none is asked for: in every backward but one
// with create_graph. A view below autograd takes the host a fraction of the time.
template <class Work>
void without_history(const Work& work) {
  if (at::GradMode::is_enabled()) return work();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  work();
}

// Whether a mode of torch's, a transform, tracer or profiler listens to the dispatcher, below
// autograd; or the tensors have no values.
bool is_heard(const Tensor& q) {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  // Inference mode includes less than the default.
  return !(included - c10::default_included_set).empty() || q.is_meta() ||
         at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

template <class Field>
constexpr bool kIsTensor = std::is_same_v<Field, Tensor> || std::is_same_v<Field, OptTensor>;

// How many fields of a tuple of references are tensors.
template <class Fields>
constexpr size_t kTensors = 0;
template <class... Field>
constexpr size_t kTensors<std::tuple<Field&...>> = (0 + ... + size_t{kIsTensor<Field>});

// What the backward needs to know of a call, but for the tensors.
struct PlainCall {
  AttnArgs attn;
  OptPlace dropout_place;
  std::optional<std::string> backend;
  Wanted wanted;
};

// visit(tensor of attn), in the order of the fields.
template <class Visit>
void for_each_tensor(AttnArgs& attn, const Visit& visit) {
  const auto visit_field = [&](auto& field) {
    if constexpr (kIsTensor<std::remove_cvref_t<decltype(field)>>) visit(field);
  };
  std::apply([&](auto&... field) { (visit_field(field), ...); }, attn.tie());
}

using GradMask = decltype(BwdArgs::grad_mask);

bool are_ordinary(BwdArgs& args) {
  const auto is_ordinary_field = [](const auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, OptTensor>) return !field || is_ordinary(*field);
    if constexpr (std::is_same_v<Field, Tensor>) return is_ordinary(field);
    return true;
  };
  return std::apply([&](auto&... field) { return (is_ordinary_field(field) && ...); }, args.tie());
}

// The op bwd; where nothing stands between it and its body, bwd_packed().
BwdResult bwd_of_packed(BwdArgs args, int packed) {
  if (packed == 0 || at::GradMode::is_enabled() || !are_ordinary(args)) {
    return call_bwd(std::move(args));
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return is_heard(args.attn.q) ? call_bwd(std::move(args)) : bwd_packed(args, packed);
}

// The gradients of q, k, v, attn_bias and learnable_sink that grad_mask names. tensors: out,
// softmax_lse, and those of the call in the order of its fields. packed: as packed_inputs() says.
variable_list gradients_of(const PlainCall& call, const variable_list& tensors,
                           const GradMask& grad_mask, const variable_list& grads, int packed) {
  const bool heads_first = call.wanted == Wanted::kOutHeadsFirst;
  BwdArgs args = {.out = tensors[0], .softmax_lse = tensors[1], .attn = call.attn};
  auto next = tensors.begin() + 2;
  for_each_tensor(args.attn, [&](auto& tensor) {
    if (next->defined()) tensor = *next;
    ++next;
  });
  args.dout =
      grads[0].defined() ? grads[0] : at::zeros_like(heads_first ? turned(args.out) : args.out);
  if (heads_first) {
    without_history([&] {
      args.dout = turned(args.dout);
      turn(args.attn);
    });
  }
  if (call.wanted == Wanted::kAll && grads[1].defined()) args.dlse = grads[1];
  args.grad_mask = grad_mask;
  args.dropout_place = call.dropout_place;
  if (call.backend) args.backend = *call.backend;
  auto [dq, dk, dv, dbias, dsink] = bwd_of_packed(std::move(args), packed);
  if (heads_first) {
    without_history([&] {
      for (Tensor* gradient : {&dq, &dk, &dv}) *gradient = turned(*gradient);
    });
  }
  variable_list results = {std::move(dq), std::move(dk), std::move(dv), std::move(dbias),
                           std::move(dsink)};
  for (size_t i = 0; i < results.size(); ++i) {
    if (!grad_mask[i]) results[i] = Tensor();
  }
  return results;
}

// The node of a forward in the graph: a Node of its own, as torch's own operations have.
// torch::autograd::Function keeps values in a hash map and notes the form of every input, for which
// a call takes longer than for its checks.
class AttentionBackward : public torch::autograd::Node {
 public:
  // `args`: the inputs as they came: a view made here would not hear of a write to what it views.
  AttentionBackward(const FwdArgs& args, Wanted wanted)
      : Node(torch::autograd::collect_next_edges(args.attn.q, args.attn.k, args.attn.v,
                                                 args.attn.attn_bias, args.attn.learnable_sink)),
        call_{args.attn, args.dropout_place, std::nullopt, wanted} {
    if (args.backend) call_.backend = *args.backend;
    auto next = saved_.begin() + 2;
    for_each_tensor(call_.attn, [&](auto& tensor) {
      *next++ = SavedVariable(tensor, /*is_output=*/false);
      tensor = std::remove_cvref_t<decltype(tensor)>();
    });
  }

  void save_results(const Tensor& out, const Tensor& softmax_lse) {
    saved_[0] = SavedVariable(out, /*is_output=*/call_.wanted != Wanted::kOutHeadsFirst);
    saved_[1] = SavedVariable(softmax_lse, /*is_output=*/call_.wanted == Wanted::kAll);
  }

  std::string name() const override { return "FlashAttentionBackward"; }

  variable_list apply(variable_list&& grads) override {
    // Two threads may run one graph, and what is saved may have hooks.
    const std::lock_guard<std::mutex> lock(mutex_);
    return gradients_of(call_, unpacked(), grad_mask(), grads, packed_inputs(next_edges()));
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& saved : saved_) saved.reset_data();
  }

  // For torch's compiled autograd, in whose trace the node is one opaque function: what of the node
  // is a constant of the trace, and the trace.
  void compiled_args(CompiledNodeArgs& args) const override {
    const auto collect = [&](const auto& value) {
      using Value = std::remove_cvref_t<decltype(value)>;
      if constexpr (std::is_same_v<Value, c10::SymInt>) {
        args.collect(value.guard_int(__FILE__, __LINE__));
      } else if constexpr (!kIsTensor<Value>) {
        args.collect(value);
      }
    };
    std::apply([&](const auto&... field) { (collect(field), ...); }, call_.attn.tie());
    collect(call_.dropout_place);
    collect(call_.backend);
    collect(static_cast<int64_t>(call_.wanted));
    for (const SavedVariable& saved : saved_) args.collect(saved, /*is_output=*/true);
  }

  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) override {
    for (SavedVariable& saved : saved_) swap.before(saved);
    std::vector<c10::IValue> given;
    std::vector<size_t> places;  // among all tensors, of those that are given
    const variable_list tensors = unpacked();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].defined()) continue;
      given.emplace_back(tensors[i]);
      places.push_back(i);
    }
    const auto traced = [call = call_, places, mask = grad_mask()](
                            const variable_list& inputs, const std::vector<c10::IValue>& values) {
      variable_list all(std::tuple_size_v<decltype(saved_)>);
      for (size_t i = 0; i < places.size(); ++i) all[places[i]] = values[i].toTensor();
      return gradients_of(call, all, mask, inputs, /*packed=*/0);
    };
    variable_list results = call_in_trace(*this, swap, traced, grads, given);
    for (SavedVariable& saved : saved_) swap.after(saved);
    return results;
  }

 private:
  variable_list unpacked() {
    variable_list tensors;
    tensors.reserve(saved_.size());
    for (const SavedVariable& saved : saved_) tensors.push_back(saved.unpack(getptr()));
    return tensors;
  }

  GradMask grad_mask() const {
    GradMask mask;
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = task_should_compute_output(i);
    return mask;
  }

  // Out, softmax_lse, and the tensors of the call in the order of its fields.
  std::array<SavedVariable, 2 + kTensors<decltype(std::declval<AttnArgs&>().tie())>> saved_;
  PlainCall call_;  // without its tensors
};

}  // namespace

FwdArgs turned(FwdArgs args) {
  turn(args.attn);
  return args;
}

void check_no_transform() {
  if (const auto& transforms = at::functorch::functorchTLSAccessor()) {
    transforms->checkSupportsCppAutogradFunction();
  }
}

variable_list call_in_trace(const torch::autograd::Node& node, SwapSavedVariables& swap,
                            const NodeWork& work, const variable_list& grads,
                            const std::vector<c10::IValue>& values) {
  const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
  const std::vector<at::TypePtr> types(values.size(), at::TensorType::get());
  const std::string bound =
      compiler->bind_function(swap.get_py_compiler(), node.name(), work, types,
                              /*is_custom_function=*/true, /*is_traceable=*/false);
  using Forms = std::vector<std::optional<torch::autograd::InputMetadata>>;
  return compiler->call_function(
      swap.get_py_compiler(), "apply_functional", bound, grads, values,
      torch::dynamo::autograd::IValuePacker<Forms>::pack(
          torch::dynamo::autograd::get_input_metadata(node.next_edges())));
}

FwdResult fwd_of_ordinary(FwdArgs args) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return is_heard(args.attn.q) ? call_fwd(std::move(args)) : fwd_wanted(args);
}

FwdResult fwd_in_graph(const FwdArgs& args, Wanted wanted) {
  check_no_transform();
  const std::shared_ptr<AttentionBackward> node(new AttentionBackward(args, wanted),
                                                torch::autograd::deleteNode);
  const bool heads_first = wanted == Wanted::kOutHeadsFirst;
  FwdResult results = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (wanted == Wanted::kAll) return call_fwd(args);
    return fwd_of_ordinary(heads_first ? turned(args) : args);
  }();
  auto& [out, softmax_lse, probs, max_logits] = results;
  if (!heads_first) {
    torch::autograd::set_history(out, node);
    if (wanted == Wanted::kAll) torch::autograd::set_history(softmax_lse, node);
    node->save_results(out, softmax_lse);
    return results;
  }
  node->save_results(out, softmax_lse);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor result = turned(out);
  // Who writes to the result writes to the out that is saved, and the backward has to hear of it.
  torch::autograd::impl::set_version_counter(result, torch::autograd::impl::version_counter(out));
  torch::autograd::set_history(result, node);
  out = result;
  return results;
}

}  // namespace flash_attn
