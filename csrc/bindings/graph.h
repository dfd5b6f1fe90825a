// A call of the op fwd in autograd's graph.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>

#include "args.h"

namespace torch::dynamo::autograd {
class SwapSavedVariables;
}

namespace flash_attn {

// What a graph gives: all results of the op; out alone; out alone of (batch, heads, rows, d), as q,
// k and v are: turned in the function, they cost no nodes of the graph.
enum class Wanted { kAll, kOut, kOutHeadsFirst };

// The op fwd below autograd, and its node. args: as the caller gave them.
FwdResult fwd_in_graph(const FwdArgs& args, Wanted wanted);

// The op fwd of ordinary tensors without a graph, of which out and LSE are wanted. Where nobody
// listens to the dispatcher, no mode of torch's, no transform, tracer or profiler, it is the body
// itself: the long list of arguments there and back takes as long as all checks.
FwdResult fwd_of_ordinary(FwdArgs args);

// A tensor of a device's own kernels, with nothing between them and autograd: no subclass, no view
// that is negated on reading, no nested or transformed tensor, no tangent.
bool is_ordinary(const at::Tensor& x);

// (batch, heads, rows, d) and (batch, rows, heads, d), into one another.
at::Tensor turned(const at::Tensor& x);
FwdArgs turned(FwdArgs args);

// Functions of C++ are not transformed: flash_attn/_functorch.py has the formula for torch.func.
void check_no_transform();

// For Node::apply_with_saved, where torch's compiled autograd traces a node: calls work(gradients,
// values), which is one opaque function in the trace.
using NodeWork = std::function<torch::autograd::variable_list(
    const torch::autograd::variable_list& grads, const std::vector<c10::IValue>& values)>;
torch::autograd::variable_list call_in_trace(const torch::autograd::Node& node,
                                             torch::dynamo::autograd::SwapSavedVariables& swap,
                                             const NodeWork& work,
                                             const torch::autograd::variable_list& grads,
                                             const std::vector<c10::IValue>& values);

}  // namespace flash_attn
