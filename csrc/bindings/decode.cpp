#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "../aten/shared_prefix.h"
#include "../cuda/cache/rotate_queries.h"
#include "../cuda/decode/decode.h"
#include "../cuda/decode/kvcache.h"
#include "../cuda/decode/prefix.h"
#include "../sm90/latent.h"
#include "cache_call.h"
#include "checks.h"
#include "mask.h"
#include "overlap.h"

namespace flash_attn {
namespace {

DecodeResult allocate_results(const DecodeArgs& args) {
  const at::Tensor& q = args.q;
  return {at::empty({q.size(0), q.size(1), q.size(2), args.v_cache.size(3)}, q.options()),
          at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat)),
          start_max_logits(q, args.return_max_logits)};
}

// A workspace a call: streams and graphs run side by side.
at::Tensor allocate_workspace(const Plan& plan, DecodeParams& params, const at::Tensor& like) {
  if (plan.workspace_rows == 0) return {};
  at::Tensor workspace = at::empty({plan.workspace_rows, params.head_dim_v + 1}, like.options());
  params.partial.o = workspace.data_ptr<float>();
  params.partial.lse = params.partial.o + plan.workspace_rows * params.head_dim_v;
  return workspace;
}

// The cache and the queries.
DecodeParams query_params(const CacheCall& call) {
  const DecodeArgs& args = call.args;
  const at::Tensor& q = args.q;
  DecodeParams params = {};
  static_cast<CacheParams&>(params) = call.params;
  params.q = q.const_data_ptr();
  params.q_strides = strides_of(q);
  params.heads_q = static_cast<int>(q.size(2));
  params.seqlen_q = static_cast<int>(q.size(1));
  params.group = params.heads_q / params.heads_kv;
  if (args.leftpad_k) params.leftpad_k = args.leftpad_k->const_data_ptr<int32_t>();
  params.softmax_scale = static_cast<float>(resolved_scale(args.softmax_scale, q.size(3)));
  params.window_left = window_to_params(args.window_left);
  params.window_right = args.causal ? 0 : window_to_params(args.window_right);
  params.rotate_by_row = params.window_left >= 0 || params.window_right >= 0;
  return params;
}

// All but the workspace.
DecodeParams decode_params(const Plan& plan, const CacheCall& call, const DecodeResult& results) {
  const auto& [out, lse, max_logits] = results;
  const DecodeArgs& args = call.args;
  DecodeParams params = query_params(call);
  params.score = score_params(args.softcap, args.alibi_slopes, args.learnable_sink, params.heads_q);
  if (args.attn_bias) params.score.bias = bias_params(*args.attn_bias, params.seqlen_q);
  if (args.tree_mask) {
    params.score.bias = bias_params(*args.tree_mask, params.seqlen_q);
    params.score.bias.keys = params.seqlen_q;  // a tree of one token broadcasts nothing
    params.score.bias.of_last_keys = true;
  }
  params.splits = plan.splits;
  params.out = out.data_ptr();
  params.out_strides = strides_of(out);
  params.lse = lse.data_ptr<float>();
  params.max_logits = max_logits_pointer(max_logits);
  return params;
}

// The same call with a block table of its own for each sequence, the shared pages in it.
DecodeArgs without_shared_prefix(DecodeArgs args) {
  if (!args.prefix_source) return args;
  args.block_table =
      aten::unshared_table(*args.block_table, args.cache_batch_idx, *args.prefix_source,
                           *args.prefix_lens, args.k_cache.size(1));
  args.cache_batch_idx = args.prefix_source = args.prefix_lens = std::nullopt;
  return args;
}

// The call as the plan's kernels read it.
DecodeArgs planned(const Plan& plan, const DecodeArgs& args) {
  return plan.prefix_pieces > 0 ? args : without_shared_prefix(args);
}

at::Tensor rotated_queries(const CacheCall& call) {
  const at::Tensor& q = call.args.q;
  at::Tensor rotated = at::empty(q.sizes(), q.options());
  cuda::run_rotate_queries(query_params(call), rotated.data_ptr(), stream_of(q));
  return rotated;
}

DecodeResult launch_once(const Plan& plan, const CacheCall& call) {
  const DecodeResult results = allocate_results(call.args);
  if (call.args.q.numel() == 0) return results;
  DecodeParams params = decode_params(plan, call, results);
  const at::Tensor workspace = allocate_workspace(plan, params, std::get<1>(results));
  if (plan.kernel == Kernel::kFwd) {
    prefill(plan, call.args, params, results);
  } else if (plan.prefix_pieces > 0) {
    cuda::run_decode_shared(params,
                            {.source = call.args.prefix_source->const_data_ptr<int32_t>(),
                             .lens = call.args.prefix_lens->const_data_ptr<int32_t>(),
                             .pieces = plan.prefix_pieces},
                            stream_of(call.args.q));
  } else if (plan.kernel == Kernel::kDecode) {
    cuda::run_decode(params, stream_of(call.args.q));
  } else if (plan.kernel == Kernel::kLatent) {
    sm90::run_latent(params, plan.grid, stream_of(call.args.q));
  } else {
    cuda::run_kvcache(params, plan.grid, stream_of(call.args.q));
  }
  return results;
}

// The forward's with_max_logits_apart() says why there may be two launches. Nothing is appended
// between them.
DecodeResult launch(CallShape shape, const Plan& plan, const CacheCall& call) {
  if (!plan.max_logits_apart) return launch_once(plan, call);
  CacheCall with_terms = call, plain = call;
  with_terms.args.return_max_logits = false;
  DecodeResult results = launch_once(plan, with_terms);

  plain.args.softcap = 0;
  plain.args.alibi_slopes.reset();
  OptTensor& bias = plain.args.attn_bias;
  if (bias && bias->scalar_type() != at::kBool) bias = seen_with_bias(*bias);
  shape.softcap = shape.alibi = false;
  shape.bool_mask = shape.bias;
  shape.shares_prefix = false;  // terms have each sequence's pages in a block table of its own
  const Plan plan_of_plain = make_plan(shape, call.args.backend);
  std::get<2>(results) = std::get<2>(launch_once(plan_of_plain, plain));
  return results;
}

}  // namespace

DecodeResult decode_planned(const CallShape& shape, const Plan& plan, const DecodeArgs& args) {
  return launch(shape, plan, cache_call(shape, planned(plan, args), nullptr));
}

DecodeResult decode(const DecodeArgs& args) {
  check(args);
  const c10::DeviceGuard guard(args.q.device());
  const CallShape shape = call_shape(args);
  const Plan plan = make_plan(shape, args.backend);
  if (plan.backend == Backend::kAten) return aten::decode(to_aten(without_shared_prefix(args)));
  return decode_planned(shape, plan, args);
}

DecodeResult kvcache(const KvcacheArgs& args) {
  check(args);
  check_writable(args);
  const c10::DeviceGuard guard(args.decode.q.device());
  const CallShape shape = call_shape(args);
  // Before anything is written: a backend that refuses leaves the cache as it was.
  const Plan plan = make_plan(shape, args.decode.backend);
  if (plan.backend != Backend::kAten && shape.appends) {
    KvcacheArgs tokens = args;
    tokens.rotary_cos = contiguous(args.rotary_cos);
    tokens.rotary_sin = contiguous(args.rotary_sin);
    CacheCall call = cache_call(shape, args.decode, &tokens);
    if (plan.prefix_pieces > 0 && call.params.rotary_cos != nullptr) {
      // Before the append: behind it decode's kernels wait for nothing but the new tokens.
      call.args.q = rotated_queries(call);
    }
    append(call.params, tokens);
    if (!args.decode.prefix_source || plan.prefix_pieces > 0) return launch(shape, plan, call);
    return launch(shape, plan, cache_call(shape, without_shared_prefix(call.args), &tokens));
  }
  const aten::Appended appended =
      aten::append(to_aten(args.decode), {.k = args.k,
                                          .v = args.v,
                                          .rotary_cos = args.rotary_cos,
                                          .rotary_sin = args.rotary_sin,
                                          .rotary_interleaved = args.rotary_interleaved});
  DecodeArgs longer = args.decode;
  longer.q = appended.q;
  longer.cache_seqlens = appended.cache_seqlens;
  if (plan.backend == Backend::kAten) return aten::decode(to_aten(without_shared_prefix(longer)));
  return launch(shape, plan, cache_call(shape, planned(plan, longer), nullptr));
}

}  // namespace flash_attn
