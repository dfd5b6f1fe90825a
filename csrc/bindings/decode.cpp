#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>

#include "../cuda/cache/append.h"
#include "../cuda/cache/gather.h"
#include "../cuda/cache/rotate_queries.h"
#include "../cuda/decode/decode.h"
#include "../cuda/decode/kvcache.h"
#include "../sm90/capability.h"
#include "checks.h"
#include "overlap.h"
#include "to_params.h"

namespace flash_attn {
namespace {

// What the kernels read of a call: tensors in place where that is possible, else copies. The caches
// themselves only if nothing is to be appended to them.
DecodeArgs kernel_args(DecodeArgs args) {
  args.q = readable(args.q);
  args.k_cache = readable(args.k_cache);
  args.v_cache = readable(args.v_cache);
  for (OptTensor* tensor : {&args.cache_seqlens, &args.cache_batch_idx, &args.leftpad_k,
                            &args.block_table, &args.alibi_slopes}) {
    *tensor = contiguous(*tensor);
  }
  if (args.learnable_sink) {
    args.learnable_sink = args.learnable_sink->to(at::kFloat).contiguous();
  }
  return args;
}

template <typename T>
const T* pointer(const OptTensor& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// args: of kernel_args. tokens: what is appended, or null.
CacheParams cache_params(const DecodeArgs& args, const KvcacheArgs* tokens) {
  const auto batch_stride = [](const OptTensor& descale) {
    return descale && descale->dim() == 2 ? descale->stride(0) : 0;
  };
  const auto head_stride = [](const OptTensor& descale) {
    return descale ? descale->stride(-1) : 0;
  };
  const bool rotates = tokens != nullptr && tokens->rotary_cos && tokens->rotary_cos->size(1) > 0;
  return {.k_cache = args.k_cache.const_data_ptr(),
          .v_cache = args.v_cache.const_data_ptr(),
          .k_strides = strides_of(args.k_cache),
          .v_strides = strides_of(args.v_cache),
          .cache_dtype = dtype_of(args.k_cache),
          .cache_rows = static_cast<int>(args.k_cache.size(0)),
          .capacity = static_cast<int>(capacity_of(args)),
          .page_size = static_cast<int>(args.k_cache.size(1)),
          .block_table = pointer<int32_t>(args.block_table),
          .table_stride = args.block_table ? args.block_table->size(1) : 0,
          .table_rows = args.block_table ? static_cast<int>(args.block_table->size(0)) : 0,
          .cache_batch_idx = pointer<int32_t>(args.cache_batch_idx),
          .cache_seqlens = pointer<int32_t>(args.cache_seqlens),
          .seqlen_new = tokens == nullptr ? 0 : static_cast<int>(tokens->k.size(1)),
          .k_descale = pointer<float>(args.k_descale),
          .v_descale = pointer<float>(args.v_descale),
          .k_descale_batch_stride = batch_stride(args.k_descale),
          .k_descale_head_stride = head_stride(args.k_descale),
          .v_descale_batch_stride = batch_stride(args.v_descale),
          .v_descale_head_stride = head_stride(args.v_descale),
          .rotary_cos = rotates ? tokens->rotary_cos->const_data_ptr() : nullptr,
          .rotary_sin = rotates ? tokens->rotary_sin->const_data_ptr() : nullptr,
          .rotary_rows = rotates ? static_cast<int>(tokens->rotary_cos->size(0)) : 0,
          .rotary_dim = rotates ? static_cast<int>(2 * tokens->rotary_cos->size(1)) : 0,
          .rotary_interleaved = rotates && tokens->rotary_interleaved,
          .dtype = dtype_of(args.q),
          .batch = static_cast<int>(args.q.size(0)),
          .heads_kv = static_cast<int>(args.k_cache.size(2)),
          .head_dim = static_cast<int>(args.q.size(3)),
          .head_dim_v = static_cast<int>(args.v_cache.size(3))};
}

// Whether the faster kernel serves the call.
bool is_plain(const DecodeArgs& args, const KvcacheArgs* tokens) {
  return tokens == nullptr && args.softcap == 0 && !args.alibi_slopes && !args.learnable_sink &&
         !(args.batch_invariant && args.num_splits > 0) &&
         args.k_cache.scalar_type() == args.q.scalar_type() &&
         args.v_cache.size(3) == args.q.size(3) &&
         (!args.block_table || args.q.size(3) <= cuda::kDecodePagedHeadDim);
}

void append_cuda(const DecodeArgs& args, const KvcacheArgs& tokens) {
  const at::Tensor k = readable(tokens.k), v = readable(tokens.v);
  AppendParams params = {};
  static_cast<CacheParams&>(params) = cache_params(args, &tokens);
  params.k = k.const_data_ptr();
  params.v = v.const_data_ptr();
  params.k_new_strides = strides_of(k);
  params.v_new_strides = strides_of(v);
  cuda::run_append(params, stream_of(args.q));
}

DecodeResult empty_results(const DecodeArgs& args) {
  const at::Tensor& q = args.q;
  return {at::empty({q.size(0), q.size(1), q.size(2), args.v_cache.size(3)}, q.options()),
          at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat))};
}

// All but the splits and their workspace. args: of kernel_args. tokens: appended just before, on the
// same stream; or null.
DecodeParams decode_params(const DecodeArgs& args, const KvcacheArgs* tokens,
                           const DecodeResult& results) {
  const auto& [out, lse] = results;
  const at::Tensor& q = args.q;
  DecodeParams params = {};
  static_cast<CacheParams&>(params) = cache_params(args, tokens);
  params.q = q.const_data_ptr();
  params.q_strides = strides_of(q);
  params.heads_q = static_cast<int>(q.size(2));
  params.seqlen_q = static_cast<int>(q.size(1));
  params.group = params.heads_q / params.heads_kv;
  params.leftpad_k = pointer<int32_t>(args.leftpad_k);
  params.softmax_scale = static_cast<float>(resolved_scale(args.softmax_scale, q.size(3)));
  params.window_left = window_to_params(args.window_left);
  params.window_right = args.causal ? 0 : window_to_params(args.window_right);
  params.rotate_by_row = params.window_left >= 0 || params.window_right >= 0;
  params.score = score_params(args.softcap, args.alibi_slopes, args.learnable_sink, params.heads_q);
  params.out = out.data_ptr();
  params.out_strides = strides_of(out);
  params.lse = lse.data_ptr<float>();
  return params;
}

// Room for that many rows of partial results, a workspace a call: streams and graphs run side by side.
at::Tensor allocate_partial(DecodeParams& params, int64_t rows, const at::Tensor& like) {
  at::Tensor workspace = at::empty({rows, params.head_dim_v + 1}, like.options());
  params.partial.o = workspace.data_ptr<float>();
  params.partial.lse = params.partial.o + rows * params.head_dim_v;
  return workspace;
}

DecodeResult decode_cuda(const DecodeArgs& args, const KvcacheArgs* tokens) {
  const DecodeResult results = empty_results(args);
  const at::Tensor &q = args.q, &lse = std::get<1>(results);
  if (q.numel() == 0) return results;
  DecodeParams params = decode_params(args, tokens, results);
  const int num_splits = static_cast<int>(args.num_splits);
  const cuda::DeviceInfo& device = device_info_of(q);
  if (is_plain(args, tokens)) {
    params.splits = cuda::decode_splits(params, num_splits, args.batch_invariant, device);
    const at::Tensor workspace = allocate_partial(params, cuda::decode_workspace_rows(params), lse);
    cuda::run_decode(params, stream_of(q));
  } else {
    params.splits = cuda::kvcache_splits(params, num_splits, args.batch_invariant);
    const cuda::KvcacheGrid grid = cuda::kvcache_grid(params, device);
    const at::Tensor workspace =
        allocate_partial(params, cuda::kvcache_workspace_rows(params, grid), lse);
    cuda::run_kvcache(params, grid, stream_of(q));
  }
  return results;
}

// The forward's view of a decode call: a dense cache in place.
FwdParams forward_params(const DecodeParams& call) {
  FwdParams params = {};
  params.q = call.q;
  params.k = call.k_cache;
  params.v = call.v_cache;
  params.q_strides = call.q_strides;
  params.k_strides = call.k_strides;
  params.v_strides = call.v_strides;
  params.dtype = call.dtype;
  params.batch = call.batch;
  params.heads_q = call.heads_q;
  params.heads_kv = call.heads_kv;
  params.head_dim = call.head_dim;
  params.head_dim_v = call.head_dim_v;
  params.seqlen_q = call.seqlen_q;
  params.seqlen_k = call.capacity;
  params.total_q = int64_t{call.batch} * call.seqlen_q;
  params.total_k = int64_t{call.cache_rows} * call.capacity;
  params.seqused_k = call.cache_seqlens;
  params.leftpad_k = call.leftpad_k;
  params.softmax_scale = call.softmax_scale;
  params.window_left = call.window_left;
  params.window_right = call.window_right;
  params.cache_batch_idx = call.cache_batch_idx;
  params.cache_rows = call.cache_rows;
  params.seqlen_new = call.seqlen_new;
  return params;
}

// The forward kernel; with few tiles their keys in pieces, and decode's kernel that merges.
void launch_prefill(Backend backend, const DecodeArgs& args, DecodeParams call, FwdParams& params,
                    const DecodeResult& results) {
  const auto& [out, lse] = results;
  params.num_splits = backend == Backend::kSm90 ? sm90::decode_splits(call_shape(args)) : 1;
  if (params.num_splits == 1) return launch_fwd(backend, params, out, lse);
  call.splits = Splits::alike(params.num_splits);
  const at::Tensor workspace = allocate_partial(call, params.num_splits * lse.numel(), lse);
  params.partial = call.partial;
  launch_fwd(backend, params, out, lse);
  cuda::run_decode_combine(call, stream_of(lse));
}

// Pages copied side by side, for as many keys as count. Sequences that cannot be, as a page of theirs
// does not exist or the copy has no room left, are decode's: which, only the device knows.
void prefill_paged(Backend backend, const DecodeArgs& args, DecodeParams& call, FwdParams params,
                   const DecodeResult& results) {
  constexpr int64_t kCopyBytes = int64_t{1} << 30;
  const at::Tensor& q = args.q;
  const int64_t key_bytes = 2 * int64_t{call.heads_kv} * (call.head_dim + call.head_dim_v);
  const int64_t rows = std::clamp<int64_t>(
      kCopyBytes / key_bytes, 1, std::max(int64_t{call.batch} * call.capacity, int64_t{1}));
  const at::Tensor k = at::empty({rows, call.heads_kv, call.head_dim}, q.options());
  const at::Tensor v = at::empty({rows, call.heads_kv, call.head_dim_v}, q.options());
  const at::Tensor index = at::empty({3 * call.batch + 1}, q.options().dtype(at::kInt));
  int32_t* const cu_seqlens = index.data_ptr<int32_t>();
  const PackedCache packed = {.k = k.data_ptr(),
                              .v = v.data_ptr(),
                              .rows = rows,
                              .cu_seqlens = cu_seqlens,
                              .seqused = cu_seqlens + call.batch + 1,
                              .missed = cu_seqlens + 2 * call.batch + 1};
  const cuda::DeviceInfo& device = device_info_of(q);
  cuda::run_gather_pages(call, packed, device, stream_of(q));

  params.k = packed.k;
  params.v = packed.v;
  params.k_strides = strides_of(k);
  params.v_strides = strides_of(v);
  params.total_k = rows;
  params.cu_seqlens_k = packed.cu_seqlens;
  params.seqused_k = packed.seqused;
  params.leftpad_k = nullptr;  // not copied
  params.cache_batch_idx = nullptr;
  params.seqlen_new = 0;
  launch_prefill(backend, args, call, params, results);

  call.sequence_mask = packed.missed;
  call.splits = Splits::alike(1);
  cuda::run_kvcache(call, cuda::kvcache_grid(call, device), stream_of(q));
}

// Many new tokens on a forward kernel, which reads K and V once for 64 to 192 of them.
DecodeResult prefill_cuda(Backend backend, const DecodeArgs& args, const KvcacheArgs* tokens) {
  const DecodeResult results = empty_results(args);
  const at::Tensor& q = args.q;
  if (q.numel() == 0) return results;
  if (args.k_cache.numel() == 0 || capacity_of(args) == 0) {
    std::get<0>(results).zero_();
    std::get<1>(results).fill_(-std::numeric_limits<float>::infinity());
    return results;
  }
  DecodeParams call = decode_params(args, tokens, results);
  FwdParams params = forward_params(call);
  at::Tensor rotated;
  if (call.rotary_cos != nullptr) {
    rotated = at::empty(q.sizes(), q.options());
    cuda::run_rotate_queries(call, rotated.data_ptr(), stream_of(q));
    params.q = rotated.data_ptr();
    params.q_strides = strides_of(rotated);
  }
  if (args.block_table) {
    prefill_paged(backend, args, call, params, results);
  } else {
    launch_prefill(backend, args, call, params, results);
  }
  return results;
}

DecodeResult run_kernels(Backend backend, const DecodeArgs& args, const KvcacheArgs* tokens) {
  return backend == Backend::kCuda ? decode_cuda(args, tokens)
                                   : prefill_cuda(backend, args, tokens);
}

DecodeResult decode_on(Backend backend, const DecodeArgs& args) {
  if (backend == Backend::kAten) return aten::decode(to_aten(args));
  return run_kernels(backend, kernel_args(args), nullptr);
}

// Whether the append kernel can write to the tensor as it lies.
bool writable_in_place(const at::Tensor& cache) { return readable(cache).is_same(cache); }

void check_places(const char* name, const at::Tensor& cache) {
  TORCH_CHECK(strides_nest(cache), "flash_attn: ", name,
              ": expected one place in memory for each element, as it is updated in place, got "
              "strides ",
              cache.strides());
}

// What the append is going to write to.
void check_writable(const KvcacheArgs& args) {
  if (args.k.numel() == 0) return;
  check_places("k_cache", args.decode.k_cache);
  check_places("v_cache", args.decode.v_cache);
  TORCH_CHECK(!share_memory(args.decode.k_cache, args.decode.v_cache),
              "flash_attn: v_cache: expected memory of its own, as both caches are updated in "
              "place, got memory of k_cache");
}

}  // namespace

DecodeResult decode(const DecodeArgs& args) {
  check(args);
  const c10::DeviceGuard guard(args.q.device());
  return decode_on(select_backend(call_shape(args), args.backend), args);
}

DecodeResult kvcache(const KvcacheArgs& args) {
  check(args);
  check_writable(args);
  const c10::DeviceGuard guard(args.decode.q.device());
  // Chosen before anything is written: a backend that refuses leaves the cache as it was.
  const Backend backend = select_backend(call_shape(args.decode), args.decode.backend);
  if (backend != Backend::kAten && writable_in_place(args.decode.k_cache) &&
      writable_in_place(args.decode.v_cache)) {
    KvcacheArgs tokens = args;
    tokens.rotary_cos = contiguous(args.rotary_cos);
    tokens.rotary_sin = contiguous(args.rotary_sin);
    const DecodeArgs step = kernel_args(args.decode);
    append_cuda(step, tokens);
    return run_kernels(backend, step, &tokens);
  }
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
