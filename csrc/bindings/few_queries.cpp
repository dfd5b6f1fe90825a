#include "few_queries.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "../cuda/few_queries.h"
#include "cache_call.h"
#include "checks.h"
#include "families.h"
#include "fwd.h"
#include "pages.h"

namespace flash_attn {
namespace {

struct DecodeCall {
  DecodeArgs args;
  CallShape shape;
  Plan plan;
};

int64_t batch_of(const AttnArgs& attn) {
  return attn.is_varlen() ? attn.cu_seqlens_q->size(0) - 1 : attn.q.size(0);
}
int64_t tokens_of(const AttnArgs& attn) {
  return attn.is_varlen() ? value(attn.max_seqlen_q) : attn.q.size(1);
}

// Whether decode computes what the call asks for.
bool has_form_of_decode(const FwdArgs& args) {
  const AttnArgs& attn = args.attn;
  const bool varlen = attn.is_varlen();
  // Decode counts from the bottom right, which is all the same where nothing is counted.
  const bool counts = attn.causal || value(attn.window_left) >= 0 ||
                      value(attn.window_right) >= 0 || attn.alibi_slopes;
  const bool is_ragged = attn.seqused_q || attn.seqused_k || attn.leftpad_k;
  return !args.return_probs && !args.return_max_logits && !args.dropout_place &&
         attn.dropout_p == 0 && !(attn.top_left && counts) && !attn.mask_tiles &&
         !(varlen && attn.attn_bias) && varlen == (attn.cu_seqlens_k || attn.block_table) &&
         (varlen || !is_ragged);
}

// Whether there are so few queries beside the keys that decode may be the faster one. Each sequence
// of a varlen call gets room for as many as any has.
bool has_few_queries(const AttnArgs& attn) {
  constexpr int64_t kLeastKeys = 512, kKeysOfAQuery = 4, kMostSequences = 65'000, kMostRoom = 4;
  // With more queries than that, calls of decode may get the forward's kernels, unless they have
  // score terms: those would stay with decode, so they are left to the forward here.
  constexpr int64_t kMostOfDecode = 16;
  const bool varlen = attn.is_varlen();
  const int64_t batch = batch_of(attn), tokens = tokens_of(attn);
  const int64_t keys = varlen ? value(attn.max_seqlen_k) : attn.k.size(1);
  if (tokens < 1 || keys < std::max(kLeastKeys, kKeysOfAQuery * tokens)) return false;
  if (varlen && batch * tokens > kMostRoom * attn.q.size(0)) return false;
  const bool is_for_decode_alone =
      varlen || attn.attn_bias || attn.softcap > 0 || attn.alibi_slopes || attn.learnable_sink;
  return batch > 0 && batch <= kMostSequences && (!is_for_decode_alone || tokens <= kMostOfDecode);
}

// The call. q of a varlen one has its shape alone: nothing is allocated for it yet.
DecodeArgs decode_args(const AttnArgs& attn) {
  DecodeArgs args = {.q = attn.q,
                     .k_cache = attn.k,
                     .v_cache = attn.v,
                     .cache_seqlens = attn.seqused_k,
                     .leftpad_k = attn.leftpad_k,
                     .block_table = attn.block_table,
                     .alibi_slopes = attn.alibi_slopes,
                     .learnable_sink = attn.learnable_sink,
                     .softmax_scale = attn.softmax_scale,
                     .causal = attn.causal,
                     .window_left = attn.window_left,
                     .window_right = attn.window_right,
                     .softcap = attn.softcap,
                     .num_splits = 0,
                     .batch_invariant = false,
                     .return_max_logits = false,
                     .attn_bias = attn.attn_bias};
  if (!attn.is_varlen()) return args;
  const int64_t batch = batch_of(attn);
  args.q = attn.q.narrow(0, 0, 1).unsqueeze(0).expand({batch, tokens_of(attn), -1, -1});
  if (attn.cu_seqlens_k) {
    // Sequences side by side are rows of one cache, of which each has a part for its own.
    args.k_cache = attn.k.unsqueeze(0).expand({batch, -1, -1, -1});
    args.v_cache = attn.v.unsqueeze(0).expand({batch, -1, -1, -1});
  }
  return args;
}

std::optional<DecodeCall> planned(const FwdArgs& args) {
  const AttnArgs& attn = args.attn;
  const bool has_numbers = attn.q.numel() > 0 && attn.k.numel() > 0 && attn.v.numel() > 0;
  const bool is_named = args.backend.has_value();
  if ((is_named && *args.backend != name(Backend::kCuda)) || gpu_of(attn.q) == nullptr ||
      !has_numbers || !has_form_of_decode(args) || !has_few_queries(attn)) {
    return std::nullopt;
  }
  if (!is_readable(attn.q) || !is_readable(attn.k) || !is_readable(attn.v)) return std::nullopt;
  DecodeCall call = {.args = decode_args(attn), .shape = {}, .plan = {}};
  call.shape = call_shape(call.args);
  if (attn.is_varlen()) call.shape.longest = value(attn.max_seqlen_k);
  call.plan = plan_call(families(), call.shape, {});
  const bool cuts_keys = !attn.is_varlen() && call.plan.splits.count > 1;
  const bool is_faster = call.plan.kernel != Kernel::kFwd || cuts_keys;
  if (call.plan.backend == Backend::kAten || !is_faster) return std::nullopt;
  if (is_named && call.plan.backend != Backend::kCuda) return std::nullopt;
  return call;
}

FwdResult varlen_fwd(DecodeCall call, const FwdArgs& args) {
  AttnArgs attn = args.attn;
  attn.softmax_scale = resolved_scale(attn.softmax_scale, attn.q.size(-1));
  attn = readable(std::move(attn));
  FwdParams params = {};
  fill_params(params, attn, {});
  if (attn.block_table) fill_pages(params, attn);
  auto [out, lse] = empty_results(attn);
  set_results(params, out, lse);

  call.args.q = at::empty(call.args.q.sizes(), attn.q.options());
  const auto tokens = static_cast<int>(call.args.q.size(1));
  const at::Tensor ends = at::empty({2, params.batch}, lse.options().dtype(at::kInt));
  call.args.leftpad_k = ends[0];
  call.args.cache_seqlens = ends[1];
  const Stream stream = stream_of(out);
  cuda::run_gather_queries(params,
                           {.q = call.args.q.data_ptr(),
                            .first = call.args.leftpad_k->data_ptr<int32_t>(),
                            .end = call.args.cache_seqlens->data_ptr<int32_t>(),
                            .tokens = tokens},
                           stream);
  const auto [even_out, even_lse, max_logits] = decode_planned(call.shape, call.plan, call.args);
  cuda::run_scatter_results(
      params,
      {.out = even_out.const_data_ptr(), .lse = even_lse.const_data_ptr<float>(), .tokens = tokens},
      stream);
  return {out, lse, at::Tensor(), at::Tensor()};
}

}  // namespace

std::optional<CallShape> shape_of_few_queries(const FwdArgs& args) {
  const std::optional<DecodeCall> call = planned(args);
  return call ? std::optional(call->shape) : std::nullopt;
}

std::optional<FwdResult> fwd_of_few_queries(const FwdArgs& args) {
  std::optional<DecodeCall> call = planned(args);
  if (!call) return std::nullopt;
  if (args.attn.is_varlen()) return varlen_fwd(*std::move(call), args);
  auto [out, lse, max_logits] = decode_planned(call->shape, call->plan, call->args);
  return FwdResult{out, lse, at::Tensor(), at::Tensor()};
}

}  // namespace flash_attn
