#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "../cuda/decode/decode.h"
#include "../cuda/decode/kvcache.h"
#include "cache_call.h"
#include "checks.h"
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
  at::Tensor workspace = at::empty({plan.workspace_rows, params.head_dim_v + 1}, like.options());
  params.partial.o = workspace.data_ptr<float>();
  params.partial.lse = params.partial.o + plan.workspace_rows * params.head_dim_v;
  return workspace;
}

// All but the workspace.
DecodeParams decode_params(const Plan& plan, const CacheCall& call, const DecodeResult& results) {
  const auto& [out, lse, max_logits] = results;
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
  params.score = score_params(args.softcap, args.alibi_slopes, args.learnable_sink, params.heads_q);
  params.splits = plan.splits;
  params.out = out.data_ptr();
  params.out_strides = strides_of(out);
  params.lse = lse.data_ptr<float>();
  params.max_logits = max_logits_pointer(max_logits);
  return params;
}

DecodeResult launch(const Plan& plan, const CacheCall& call) {
  const DecodeResult results = allocate_results(call.args);
  if (call.args.q.numel() == 0) return results;
  DecodeParams params = decode_params(plan, call, results);
  const at::Tensor workspace = allocate_workspace(plan, params, std::get<1>(results));
  if (plan.kernel == Kernel::kFwd) {
    prefill(plan, call.args, params, results);
  } else if (plan.kernel == Kernel::kDecode) {
    cuda::run_decode(params, stream_of(call.args.q));
  } else {
    cuda::run_kvcache(params, plan.grid, stream_of(call.args.q));
  }
  return results;
}

}  // namespace

DecodeResult decode(const DecodeArgs& args) {
  check(args);
  const c10::DeviceGuard guard(args.q.device());
  const CallShape shape = call_shape(args);
  const Plan plan = make_plan(shape, args.backend);
  if (plan.backend == Backend::kAten) return aten::decode(to_aten(args));
  return launch(plan, cache_call(shape, args, nullptr));
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
    const CacheCall call = cache_call(shape, args.decode, &tokens);
    append(call.params, tokens);
    return launch(plan, call);
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
  if (plan.backend == Backend::kAten) return aten::decode(to_aten(longer));
  return launch(plan, cache_call(shape, longer, nullptr));
}

}  // namespace flash_attn
