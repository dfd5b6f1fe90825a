#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <c10/core/DeviceGuard.h>

#include <limits>

#include "checks.h"
#include "to_params.h"

namespace flash_attn {
namespace {

DecodeResult decode_cuda(const DecodeArgs& args) {
  const at::Tensor q = readable(args.q), k = readable(args.k_cache), v = readable(args.v_cache);
  const OptTensor cache_seqlens = contiguous(args.cache_seqlens);
  at::Tensor out = at::empty(q.sizes(), q.options());
  const auto fp32 = q.options().dtype(at::kFloat);
  at::Tensor lse = at::empty({q.size(0), q.size(2), q.size(1)}, fp32);
  if (q.numel() == 0 || k.numel() == 0) {
    return {out.zero_(), lse.fill_(-std::numeric_limits<float>::infinity())};
  }
  DecodeParams params = {};
  params.q = q.const_data_ptr();
  params.k_cache = k.const_data_ptr();
  params.v_cache = v.const_data_ptr();
  params.q_strides = strides_of(q);
  params.k_strides = strides_of(k);
  params.v_strides = strides_of(v);
  params.dtype = dtype_of(q);
  params.batch = static_cast<int>(q.size(0));
  params.heads_q = static_cast<int>(q.size(2));
  params.heads_kv = static_cast<int>(k.size(2));
  params.head_dim = static_cast<int>(q.size(3));
  params.seqlen_q = static_cast<int>(q.size(1));
  params.capacity = static_cast<int>(k.size(1));
  params.cache_seqlens = cache_seqlens ? cache_seqlens->const_data_ptr<int32_t>() : nullptr;
  params.softmax_scale = static_cast<float>(resolved_scale(args.softmax_scale, q.size(3)));
  params.window_left = window_to_params(args.window_left);
  params.window_right = args.causal ? 0 : window_to_params(args.window_right);
  params.num_splits = static_cast<int>(args.num_splits);
  params.out = out.data_ptr();
  params.out_strides = strides_of(out);
  params.lse = lse.data_ptr<float>();
  const cuda::DeviceInfo& device = device_info_of(q);
  if (params.num_splits == 0) params.num_splits = cuda::decode_num_splits(params, device);
  at::Tensor partial_o, partial_lse;  // a workspace a call: streams and graphs run side by side
  if (params.num_splits > 1) {
    partial_o = at::empty({params.num_splits, q.size(0), q.size(2), q.size(1), q.size(3)}, fp32);
    partial_lse = at::empty({params.num_splits, q.size(0), q.size(2), q.size(1)}, fp32);
    params.partial_o = partial_o.data_ptr<float>();
    params.partial_lse = partial_lse.data_ptr<float>();
  }
  cuda::run_decode(params, device, stream_of(q));
  return {out, lse};
}

DecodeResult decode_on(Backend backend, const DecodeArgs& args) {
  return backend == Backend::kCuda ? decode_cuda(args) : aten::decode(to_aten(args));
}

void check_writable(const char* name, const at::Tensor& cache) {
  for (int64_t d = 0; d < cache.dim(); ++d) {
    TORCH_CHECK(cache.stride(d) != 0 || cache.size(d) <= 1, "flash_attn: ", name,
                ": expected one place in memory for each element, as it is updated in place, got "
                "strides ",
                cache.strides());
  }
}

}  // namespace

DecodeResult decode(const DecodeArgs& args) {
  check(args);
  const c10::DeviceGuard guard(args.q.device());
  return decode_on(select_backend(call_shape(args), args.backend), args);
}

DecodeResult kvcache(const KvcacheArgs& args) {
  check(args);
  check_writable("k_cache", args.decode.k_cache);
  check_writable("v_cache", args.decode.v_cache);
  const c10::DeviceGuard guard(args.decode.q.device());
  // Chosen before anything is written: a backend that refuses leaves the cache as it was.
  const Backend backend = select_backend(call_shape(args.decode), args.decode.backend);
  const aten::Appended appended =
      aten::append(to_aten(args.decode), {.k = args.k,
                                          .v = args.v,
                                          .rotary_cos = args.rotary_cos,
                                          .rotary_sin = args.rotary_sin,
                                          .rotary_interleaved = args.rotary_interleaved});
  DecodeArgs step = args.decode;
  step.q = appended.q;
  step.cache_seqlens = appended.cache_seqlens;
  return decode_on(backend, step);
}

// Two draws from torch's generator of the device: reproducible by manual_seed, and advanced by a
// replayed CUDA graph.
at::Tensor rng_state(const at::Tensor& like) {
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, like.options().dtype(at::kLong));
}

}  // namespace flash_attn
