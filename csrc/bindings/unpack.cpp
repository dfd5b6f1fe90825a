// torch's unbind stacks the gradients of its results, a copy of them all. The node here takes them as
// they lie if they lie side by side, as AttentionBackward (bindings/graph.cpp) then has them.
#include "unpack.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>

#include "graph.h"

namespace flash_attn {

using at::Tensor;
using torch::autograd::variable_list;

namespace {

constexpr int64_t kPackedDim = -3;

// The tensor that the parts are all slices of; undefined if they are not, or if anybody else has a
// part of it: whoever gets a gradient may add to it in place.
Tensor whole_of(const variable_list& parts) {
  const auto is_owned = [](const Tensor& part) {
    return part.defined() && is_ordinary(part) && torch::autograd::impl::is_tensor_stealable(part);
  };
  if (!std::all_of(parts.begin(), parts.end(), is_owned)) return {};
  const Tensor& first = parts.front();
  if (first.storage().use_count() != parts.size()) return {};
  c10::DimVector sizes(first.sizes());
  sizes.insert(sizes.end() + 1 + kPackedDim, static_cast<int64_t>(parts.size()));
  const c10::DimVector strides = c10::contiguous_strides(sizes);
  c10::DimVector strides_of_part = strides;
  strides_of_part.erase(strides_of_part.end() + kPackedDim);
  int64_t offset = first.storage_offset();
  for (const Tensor& part : parts) {
    if (!part.is_alias_of(first) || part.sizes() != first.sizes() ||
        part.strides() != strides_of_part || part.storage_offset() != offset) {
      return {};
    }
    offset += *(strides.end() + kPackedDim);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return first.as_strided(sizes, strides);
}

// A copy of the parts, side by side; those that are undefined count as zeros.
Tensor stacked(variable_list parts) {
  const auto defined =
      std::find_if(parts.begin(), parts.end(), [](const Tensor& part) { return part.defined(); });
  if (defined == parts.end()) return {};
  const Tensor like = *defined;
  for (Tensor& part : parts) {
    if (!part.defined()) part = at::zeros_like(like);
  }
  return at::stack(parts, kPackedDim);
}

class UnpackBackward : public torch::autograd::Node {
 public:
  explicit UnpackBackward(const Tensor& packed)
      : Node(torch::autograd::collect_next_edges(packed)) {}

  std::string name() const override { return "FlashAttentionUnpackBackward"; }

  variable_list apply(variable_list&& grads) override {
    if (!at::GradMode::is_enabled()) {
      if (Tensor whole = whole_of(grads); whole.defined()) return {std::move(whole)};
    }
    return {stacked(std::move(grads))};
  }

  // For torch's compiled autograd: nothing of the node is a constant of the trace.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    const auto traced = [](const variable_list& inputs, const std::vector<c10::IValue>&) {
      return variable_list{stacked(inputs)};
    };
    return call_in_trace(*this, swap, traced, grads, {});
  }
};

}  // namespace

int packed_inputs(const torch::autograd::edge_list& edges) {
  const auto* const node = dynamic_cast<const UnpackBackward*>(edges[2].function.get());
  if (node == nullptr) return 0;
  const uint32_t count = node->num_inputs();
  if (count != 2 && count != 3) return 0;
  for (uint32_t i = 0; i < count; ++i) {
    const torch::autograd::Edge& edge = edges[3 - count + i];
    if (edge.function.get() != node || edge.input_nr != i) return 0;
  }
  return static_cast<int>(count);
}

std::vector<Tensor> call_unpack(const Tensor& packed) {
  if (!at::GradMode::is_enabled() || !packed.requires_grad() || !is_ordinary(packed)) {
    return packed.unbind(kPackedDim);
  }
  const std::shared_ptr<UnpackBackward> node(new UnpackBackward(packed),
                                             torch::autograd::deleteNode);
  // torch makes its views: they have packed's version, and nobody may write to one of several.
  std::vector<Tensor> parts = [&] {
    const at::AutoDispatchBelowAutograd below_autograd;
    return packed.unbind(kPackedDim);
  }();
  torch::autograd::set_history(parts, node);
  return parts;
}

}  // namespace flash_attn
