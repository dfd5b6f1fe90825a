#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "../cuda/decode/decode.h"
#include "../cuda/decode/kvcache.h"
#include "cache_call.h"
#include "checks.h"

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

// args: of kernel_args.
DecodeResult launch(const Plan& plan, const DecodeArgs& args, const CacheParams& cache) {
  const DecodeResult results = allocate_results(args);
  if (args.q.numel() == 0) return results;
  DecodeParams params = decode_params(plan, args, cache, results);
  const at::Tensor workspace = allocate_workspace(plan, params, std::get<1>(results));
  if (plan.kernel == Kernel::kFwd) {
    prefill(plan, args, params, results);
  } else if (plan.kernel == Kernel::kDecode) {
    cuda::run_decode(params, stream_of(args.q));
  } else {
    cuda::run_kvcache(params, plan.grid, stream_of(args.q));
  }
  return results;
}

}  // namespace

DecodeResult decode(const DecodeArgs& args) {
  check(args);
  const c10::DeviceGuard guard(args.q.device());
  const Plan plan = make_plan(call_shape(args), args.backend);
  if (plan.backend == Backend::kAten) return aten::decode(to_aten(args));
  const DecodeArgs step = kernel_args(args);
  return launch(plan, step, cache_params(step, nullptr));
}

DecodeResult kvcache(const KvcacheArgs& args) {
  check(args);
  check_writable(args);
  const c10::DeviceGuard guard(args.decode.q.device());
  CallShape call = call_shape(args.decode);
  call.appends = appends_in_place(args.decode);
  // Before anything is written: a backend that refuses leaves the cache as it was.
  const Plan plan = make_plan(call, args.decode.backend);
  if (plan.backend != Backend::kAten && call.appends) {
    KvcacheArgs tokens = args;
    tokens.rotary_cos = contiguous(args.rotary_cos);
    tokens.rotary_sin = contiguous(args.rotary_sin);
    const DecodeArgs step = kernel_args(args.decode);
    const CacheParams cache = cache_params(step, &tokens);
    append(cache, tokens);
    return launch(plan, step, cache);
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
  const DecodeArgs step = kernel_args(longer);
  return launch(plan, step, cache_params(step, nullptr));
}

}  // namespace flash_attn
