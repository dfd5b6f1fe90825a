// From tensors to what the kernels read: which backend serves the call, inputs a kernel can read in
// place, params.
#pragma once

#include <string>
#include <vector>

#include "../aten/attention.h"
#include "../aten/gpu.h"
#include "../core/backend.h"
#include "args.h"

namespace flash_attn {

CallShape call_shape(const FwdArgs& args);
CallShape call_shape(const BwdArgs& args);
CallShape backward_shape(const FwdArgs& args);  // of the backward that would follow
CallShape call_shape(const DecodeArgs& args);
CallShape call_shape(
    const KvcacheArgs& args);  // appends: the append kernel can write to the caches

// Whether the mask of a varlen call is dealt out with its sequences (bindings/key_mask.h): for the
// choice of a backend, the call has none.
bool deals_out_sequences(const AttnArgs& args);

// How the call is served; one on a GPU that falls to aten warns once for each set of reasons.
Plan make_plan(const CallShape& call, OptName forced);
inline Backend select_backend(const CallShape& call, OptName forced) {
  return make_plan(call, forced).backend;
}

aten::Args to_aten(const AttnArgs& args, const OptPlace& dropout_place);
aten::DecodeArgs to_aten(const DecodeArgs& args);

// The tensor itself where a kernel can read it (last dimension contiguous; base and strides
// multiples of 16 bytes); else one copy, its head_dim padded with zeros to a multiple of 8.
at::Tensor readable(const at::Tensor& tensor);
bool is_readable(const at::Tensor& tensor);  // as it lies
OptTensor contiguous(const OptTensor& tensor);

// Reads (batch, row, head) strides of a dense or varlen tensor. A dimension of size 1 counts 0,
// whatever it says.
Strides strides_of(const at::Tensor& tensor);

// A bias as (batch or 1, heads or 1, rows or 1, keys or 1), of bool, fp32 or a third dtype, which
// are what a kernel reads.
at::Tensor readable_bias(at::Tensor bias, at::ScalarType third);
// The same for kernels. seqlen_q: of dense tensors, or 0.
BiasParams bias_params(const at::Tensor& bias, int64_t seqlen_q);

// Every tensor of the call as the kernels read it.
AttnArgs readable(AttnArgs args);
// What forward and backward share, of readable() arguments.
void fill_params(AttnParams& params, const AttnArgs& args, const OptPlace& dropout_place);
ScoreParams score_params(const AttnArgs& args);
// alibi_slopes and learnable_sink: contiguous, fp32.
ScoreParams score_params(double softcap, const OptTensor& alibi_slopes,
                         const OptTensor& learnable_sink, int heads_q);

// The call asks for it, or torch.use_deterministic_algorithms().
bool is_deterministic(const AttnArgs& args);

// causal means nothing to the right of the diagonal; a window beyond 2^30 is none that any sequence
// notices.
int window_to_params(const c10::SymInt& window);
// Where kernels leave the largest logits: (heads_q) of -inf, or empty if not wanted; q: (…,
// heads_q, d). And the pointer that params take.
at::Tensor start_max_logits(const at::Tensor& q, bool wanted);
float* max_logits_pointer(const at::Tensor& max_logits);

}  // namespace flash_attn
