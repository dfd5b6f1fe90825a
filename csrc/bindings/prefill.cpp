#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "../cuda/cache/gather.h"
#include "../cuda/cache/rotate_queries.h"
#include "../cuda/decode/decode.h"
#include "../cuda/decode/kvcache.h"
#include "cache_call.h"
#include "fwd.h"
#include "key_mask.h"
#include "pages.h"

namespace flash_attn {
namespace {

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
  params.num_splits = call.splits.count;
  params.partial = call.partial;
  return params;
}

// The forward kernel; with few tiles their keys in pieces, and decode's kernel that merges.
void launch_forward(const Plan& plan, FwdParams& params, const DecodeParams& call,
                    const DecodeResult& results) {
  const auto& [out, lse, max_logits] = results;
  set_results(params, out, lse);
  launch_fwd(plan, params, out);
  if (plan.splits.count > 1) cuda::run_decode_combine(call, stream_of(lse));
}

// Leaves the sequences that `missed` names to decode's kernels.
void launch_rest(const Plan& plan, DecodeParams& call, const int32_t* missed, Stream stream) {
  call.sequence_mask = missed;
  call.splits = plan.rest_splits;
  call.partial = {};
  if (plan.rest == Kernel::kDecode) return cuda::run_decode(call, stream);
  cuda::run_kvcache(call, plan.grid, stream);
}

// Whether the forward reads the pages where they lie, as in bindings/pages.cpp.
bool reads_pages(const Plan& plan, const DecodeParams& call) {
  return plan.backend == Backend::kSm90 && call.leftpad_k == nullptr &&
         fits_boxes(call.page_size, call.window_left, /*top_left=*/false);
}

// Sequences that lack a page may be decode's: which, only the device knows.
void prefill_in_place(const Plan& plan, FwdParams params, DecodeParams& call, const at::Tensor& q,
                      const DecodeResult& results) {
  params.pages = {.entries = call.block_table,
                  .row_stride = call.table_stride,
                  .page_size = call.page_size,
                  .num_pages = call.cache_rows};
  params.cache_rows = call.table_rows;
  if (runs_in_pieces(plan)) return launch_forward(plan, params, call, results);
  const DealtSequences dealt(params, q);
  launch_forward(plan, params, call, results);
  launch_rest(plan, call, dealt.hidden(), stream_of(q));
}

// Pages copied side by side, for as many keys as count. Sequences that cannot be, as a page of
// theirs does not exist or the copy has no room left, are decode's: which, only the device knows.
void prefill_paged(const Plan& plan, FwdParams params, DecodeParams& call, const at::Tensor& q,
                   const DecodeResult& results) {
  constexpr int64_t kCopyBytes = int64_t{1} << 30;
  const int64_t key_bytes =
      q.element_size() * call.heads_kv * int64_t{call.head_dim + call.head_dim_v};
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
  cuda::run_gather_pages(call, packed, *plan.device, stream_of(q));

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
  launch_forward(plan, params, call, results);

  launch_rest(plan, call, packed.missed, stream_of(q));
}

}  // namespace

void prefill(const Plan& plan, const DecodeArgs& args, DecodeParams& call,
             const DecodeResult& results) {
  const at::Tensor& q = args.q;
  if (args.k_cache.numel() == 0 || call.capacity == 0) {
    std::get<0>(results).zero_();
    std::get<1>(results).fill_(-std::numeric_limits<float>::infinity());
    return;
  }
  FwdParams params = forward_params(call);
  at::Tensor rotated;
  if (call.rotary_cos != nullptr) {
    rotated = at::empty(q.sizes(), q.options());
    cuda::run_rotate_queries(call, rotated.data_ptr(), stream_of(q));
    params.q = rotated.data_ptr();
    params.q_strides = strides_of(rotated);
  }
  if (call.block_table != nullptr && reads_pages(plan, call)) {
    return prefill_in_place(plan, params, call, q, results);
  }
  if (call.block_table != nullptr) return prefill_paged(plan, params, call, q, results);
  launch_forward(plan, params, call, results);
}

}  // namespace flash_attn
