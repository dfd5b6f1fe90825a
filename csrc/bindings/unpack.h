// q, k and v, or k and v, as views of one tensor in which they lie side by side: what
// call_unpack() gives.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace flash_attn {

// How many of the last of q, k and v are all that one call_unpack() gave, in its order: 0, 2 or 3.
// edges: those of q, k and v, and any others behind them.
int packed_inputs(const torch::autograd::edge_list& edges);

}  // namespace flash_attn
