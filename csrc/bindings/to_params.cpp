#include "to_params.h"

#include <ATen/Context.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>

#include "../core/score_range.h"
#include "../sm80/large_head.h"
#include "checks.h"
#include "families.h"

namespace flash_attn {
namespace {

constexpr int64_t kAlignBytes = 16;

// Whether v is the first columns of k, row by row the same memory.
bool lies_in(const at::Tensor& v, const at::Tensor& k) {
  return v.is_alias_of(k) && v.sym_storage_offset() == k.sym_storage_offset() &&
         v.sym_strides() == k.sym_strides() && v.sym_size(-1) <= k.sym_size(-1);
}

CallShape call_shape_of(Op op, const at::Tensor& q, const at::Tensor& v) {
  return {
      .op = op,
      .device = gpu_of(q),
      .dtype = dtype_of(q),
      // size(-1) would read every symbolic size under torch.compile, and compile for each length.
      .head_dim = value(q.sym_size(-1)),
      .head_dim_v = value(v.sym_size(-1))};
}

CallShape call_shape_of(Op op, const AttnArgs& args, bool return_probs, bool max_logits) {
  CallShape call = call_shape_of(op, args.q, args.v);
  call.tile_mask = args.mask_tiles.has_value();
  const bool has_bias = args.attn_bias && !deals_out_sequences(args);
  call.bias = has_bias || call.tile_mask;
  call.bool_mask = call.tile_mask || (has_bias && args.attn_bias->scalar_type() == at::kBool);
  if (has_bias && args.attn_bias->dim() > 0) {
    const at::Tensor& bias = *args.attn_bias;
    call.bias_of_keys = bias.sym_size(-1) != 1 && (bias.dim() == 1 || bias.sym_size(-2) == 1);
  }
  if (has_bias && !args.cu_seqlens_q && !args.cu_seqlens_k) {
    const auto dtype = args.attn_bias->scalar_type();
    call.dense_bias = dtype == args.q.scalar_type() || (call.bias_of_keys && dtype == at::kBool);
  }
  call.ragged =
      args.cu_seqlens_q || args.cu_seqlens_k || args.seqused_q || args.seqused_k || args.leftpad_k;
  call.paged = args.block_table.has_value();
  call.alibi = args.alibi_slopes.has_value();
  call.softcap = args.softcap > 0;
  call.dropout = args.dropout_p > 0;
  call.sink = args.learnable_sink.has_value();
  call.return_probs = return_probs;
  call.max_logits = max_logits;
  return call;
}

CallShape backward_shape_of(const AttnArgs& args, bool bias_gradient) {
  CallShape call = call_shape_of(Op::kBackward, args, false, false);
  call.deterministic = is_deterministic(args);
  call.bias_gradient = bias_gradient;
  return call;
}

double finite_softcap(double softcap) {
  return softcap > 0 ? std::clamp(softcap, kMinSoftcap, kMaxSoftcap) : 0;
}

void warn_once(const std::string& reasons) {
  static std::mutex mutex;
  static std::set<std::string> seen;
  const std::lock_guard<std::mutex> lock(mutex);
  if (seen.insert(reasons).second) {
    TORCH_WARN("flash_attn: this call runs on the backend aten, exact but slower than a kernel: ",
               reasons);
  }
}

DropoutPlace place_of(const OptPlace& place) {
  if (!place) return {};
  const std::vector<int64_t>& at = *place;
  return {.sequence = at[0], .head = at[1], .heads = at[2], .query = at[3], .key = at[4]};
}

}  // namespace

bool deals_out_sequences(const AttnArgs& args) {
  if (!args.is_varlen() || !args.attn_bias || gpu_of(args.q) == nullptr) return false;
  const at::Tensor& mask = *args.attn_bias;
  bool of_keys = mask.scalar_type() == at::kBool && mask.dim() > 0 && mask.sym_size(-1) != 1;
  for (int64_t d = 2; d <= std::min<int64_t>(mask.dim(), 3); ++d) {
    of_keys = of_keys && mask.sym_size(-d) == 1;
  }
  // What sm80's kernels with score terms serve on every GPU.
  const auto dtype = args.q.scalar_type();
  const CallShape call = call_shape_of(Op::kForward, args.q, args.v);
  return of_keys && (dtype == at::kHalf || dtype == at::kBFloat16) &&
         std::max(call.head_dim, call.head_dim_v) <= sm80::kMaxHeadDim && call.portable_code() != 0;
}

CallShape call_shape(const FwdArgs& args) {
  return call_shape_of(Op::kForward, args.attn, args.return_probs, args.return_max_logits);
}
CallShape call_shape(const BwdArgs& args) {
  return backward_shape_of(args.attn, args.attn.attn_bias && args.grad_mask[3]);
}
CallShape backward_shape(const FwdArgs& args) {
  return backward_shape_of(args.attn, args.attn.attn_bias && args.attn.attn_bias->requires_grad());
}
CallShape call_shape(const DecodeArgs& args) {
  CallShape call = call_shape_of(Op::kDecode, args.q, args.v_cache);
  call.bias = args.attn_bias || args.tree_mask;
  call.bool_mask = args.tree_mask || (args.attn_bias && args.attn_bias->scalar_type() == at::kBool);
  call.alibi = args.alibi_slopes.has_value();
  call.softcap = args.softcap > 0;
  call.sink = args.learnable_sink.has_value();
  call.cache_dtype = dtype_of(args.k_cache);
  call.batch = value(args.q.sym_size(0));
  call.tokens = value(args.q.sym_size(1));
  call.heads_q = value(args.q.sym_size(2));
  call.heads_kv = value(args.k_cache.sym_size(2));
  call.capacity = value(args.capacity());
  call.num_splits = args.num_splits;
  call.window_left = value(args.window_left);
  call.paged = args.block_table.has_value();
  call.odd_pages = call.paged && value(args.k_cache.sym_size(1)) % PageTable::kMultiple != 0;
  call.values_in_keys = lies_in(args.v_cache, args.k_cache);
  call.batch_invariant = args.batch_invariant;
  call.shares_prefix = args.prefix_source.has_value() && !args.leftpad_k;
  call.max_logits = args.return_max_logits;
  call.ragged = args.leftpad_k.has_value();
  return call;
}

CallShape call_shape(const KvcacheArgs& args) {
  CallShape call = call_shape(args.decode);
  call.appends = is_readable(args.decode.k_cache) && is_readable(args.decode.v_cache);
  call.rotates = args.rotary_cos.has_value();
  return call;
}

Plan make_plan(const CallShape& call, OptName forced) {
  try {
    const Plan plan = plan_call(families(), call, forced);
    if (plan.backend == Backend::kAten && call.device != nullptr && !forced) {
      // To put the reasons together takes as long as some calls.
      static thread_local std::optional<CallShape> last;
      if (last != call) warn_once(join(why_not_faster(families(), call), "; "));
      last = call;
    }
    return plan;
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK(false, error.what());
  }
}

aten::Args to_aten(const AttnArgs& args, const OptPlace& dropout_place) {
  return {.q = args.q,
          .k = args.k,
          .v = args.v,
          .cu_seqlens_q = args.cu_seqlens_q,
          .cu_seqlens_k = args.cu_seqlens_k,
          .seqused_q = args.seqused_q,
          .seqused_k = args.seqused_k,
          .leftpad_k = args.leftpad_k,
          .attn_bias = args.attn_bias,
          .alibi_slopes = args.alibi_slopes,
          .learnable_sink = args.learnable_sink,
          .rng_state = args.rng_state,
          .max_seqlen_q = args.is_varlen() ? value(args.max_seqlen_q) : args.q.size(1),
          .max_seqlen_k = args.is_varlen() ? value(args.max_seqlen_k) : args.k.size(1),
          .dropout_p = args.dropout_p,
          .dropout_place = place_of(dropout_place),
          .softmax_scale = resolved_scale(args.softmax_scale, args.q.size(-1)),
          .window_left = value(args.window_left),
          .window_right = args.causal ? 0 : value(args.window_right),
          .top_left = args.top_left,
          .softcap = finite_softcap(args.softcap)};
}

aten::DecodeArgs to_aten(const DecodeArgs& args) {
  return {.q = args.q,
          .k_cache = args.k_cache,
          .v_cache = args.v_cache,
          .cache_seqlens = args.cache_seqlens,
          .cache_batch_idx = args.cache_batch_idx,
          .leftpad_k = args.leftpad_k,
          .block_table = args.block_table,
          .attn_bias = args.attn_bias,
          .tree_mask = args.tree_mask,
          .alibi_slopes = args.alibi_slopes,
          .learnable_sink = args.learnable_sink,
          .k_descale = args.k_descale,
          .v_descale = args.v_descale,
          .softmax_scale = resolved_scale(args.softmax_scale, args.q.size(-1)),
          .window_left = value(args.window_left),
          .window_right = args.causal ? 0 : value(args.window_right),
          .softcap = finite_softcap(args.softcap),
          .num_splits = args.num_splits,
          .batch_invariant = args.batch_invariant,
          .wants_max_logits = args.return_max_logits};
}

bool is_readable(const at::Tensor& tensor) {
  const int64_t align = kAlignBytes / tensor.element_size();
  bool in_place = tensor.size(-1) % 8 == 0 && tensor.stride(-1) == 1 &&
                  reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignBytes == 0;
  for (int64_t d = 0; in_place && d + 1 < tensor.dim(); ++d) {
    in_place = tensor.size(d) <= 1 || tensor.stride(d) % align == 0;
  }
  return in_place;
}

at::Tensor readable(const at::Tensor& tensor) {
  if (is_readable(tensor)) return tensor;
  if (const int64_t missing = -tensor.size(-1) & 7; missing != 0)
    return at::constant_pad_nd(tensor, {0, missing});
  return tensor.clone(at::MemoryFormat::Contiguous);
}

OptTensor contiguous(const OptTensor& tensor) {
  return tensor ? OptTensor(tensor->contiguous()) : tensor;
}

Strides strides_of(const at::Tensor& tensor) {
  const auto stride = [&](int64_t d) { return tensor.size(d) == 1 ? 0 : tensor.stride(d); };
  if (tensor.dim() == 3) return {.batch = 0, .row = stride(0), .head = stride(1)};
  return {.batch = stride(0), .row = stride(1), .head = stride(2)};
}

at::Tensor readable_bias(at::Tensor bias, at::ScalarType third) {
  const auto dtype = bias.scalar_type();
  if (dtype != at::kBool && dtype != at::kFloat && dtype != third) bias = bias.to(at::kFloat);
  while (bias.dim() < 4) bias = bias.unsqueeze(0);
  return bias;
}

BiasParams bias_params(const at::Tensor& bias, int64_t seqlen_q) {
  const auto stride = [&](int64_t d) { return bias.size(d) == 1 ? 0 : bias.stride(d); };
  const auto length = [&](int64_t d) {
    return bias.size(d) == 1 ? std::numeric_limits<int>::max() : static_cast<int>(bias.size(d));
  };
  BiasParams params = {
      .data = bias.const_data_ptr(),
      .dtype = bias.scalar_type() == at::kBool ? DType::kBool : dtype_of(bias),
      .rows = bias.size(2) == 1 && seqlen_q > 0 ? static_cast<int>(seqlen_q) : length(2),
      .keys = length(3),
      .batch_stride = stride(0),
      .head_stride = stride(1),
      .row_stride = stride(2),
      .key_stride = stride(3)};
  const auto pair_bytes = static_cast<uintptr_t>(2 * bias.element_size());
  params.in_pairs = params.key_stride == 1 && params.keys % 2 == 0 &&
                    params.batch_stride % 2 == 0 && params.head_stride % 2 == 0 &&
                    params.row_stride % 2 == 0 &&
                    reinterpret_cast<uintptr_t>(params.data) % pair_bytes == 0;
  return params;
}

AttnArgs readable(AttnArgs args) {
  args.q = readable(args.q);
  args.k = readable(args.k);
  args.v = readable(args.v);
  for (OptTensor* vector :
       {&args.cu_seqlens_q, &args.cu_seqlens_k, &args.seqused_q, &args.seqused_k, &args.leftpad_k,
        &args.block_table, &args.alibi_slopes, &args.rng_state, &args.mask_tiles, &args.mask_rows,
        &args.mask_labels}) {
    *vector = contiguous(*vector);
  }
  if (args.learnable_sink) args.learnable_sink = args.learnable_sink->to(at::kFloat).contiguous();
  const auto is_aligned = [](const at::Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignBytes == 0;
  };
  if (args.mask_rows && !is_aligned(*args.mask_rows)) args.mask_rows = args.mask_rows->clone();
  if (args.attn_bias) args.attn_bias = readable_bias(*args.attn_bias, args.q.scalar_type());
  return args;
}

namespace {

// Whether torch lets products of fp32 matrices be those of numbers rounded to TF32: what
// torch.backends.cuda.matmul.allow_tf32 and torch.set_float32_matmul_precision say.
bool tf32_is_allowed() {
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::TF32 && !at::NoTF32Guard::should_disable_tf32();
}

}  // namespace

void fill_params(AttnParams& params, const AttnArgs& args, const OptPlace& dropout_place) {
  const bool varlen = args.is_varlen();
  const auto pointer = [](const OptTensor& tensor) {
    return tensor ? tensor->const_data_ptr<int32_t>() : nullptr;
  };
  params = {.q = args.q.const_data_ptr(),
            .k = args.k.const_data_ptr(),
            .v = args.v.const_data_ptr(),
            .q_strides = strides_of(args.q),
            .k_strides = strides_of(args.k),
            .v_strides = strides_of(args.v),
            .dtype = args.q.scalar_type() == at::kFloat && tf32_is_allowed() ? DType::kTf32
                                                                             : dtype_of(args.q),
            .batch = static_cast<int>(varlen ? args.cu_seqlens_q->size(0) - 1 : args.q.size(0)),
            .heads_q = static_cast<int>(args.q.size(-2)),
            .heads_kv = static_cast<int>(args.k.size(-2)),
            .head_dim = static_cast<int>(args.q.size(-1)),
            .head_dim_v = static_cast<int>(args.v.size(-1)),
            .seqlen_q = static_cast<int>(varlen ? value(args.max_seqlen_q) : args.q.size(1)),
            .seqlen_k = static_cast<int>(varlen ? value(args.max_seqlen_k) : args.k.size(1)),
            .total_q = varlen ? args.q.size(0) : args.q.size(0) * args.q.size(1),
            .total_k = varlen ? args.k.size(0) : args.k.size(0) * args.k.size(1),
            .cu_seqlens_q = pointer(args.cu_seqlens_q),
            .cu_seqlens_k = pointer(args.cu_seqlens_k),
            .seqused_q = pointer(args.seqused_q),
            .seqused_k = pointer(args.seqused_k),
            .leftpad_k = pointer(args.leftpad_k),
            .softmax_scale = static_cast<float>(*args.softmax_scale),
            .window_left = window_to_params(args.window_left),
            .window_right = args.causal ? 0 : window_to_params(args.window_right),
            .top_left = args.top_left};
  if (args.dropout_p > 0) {
    params.dropout = DropoutParams::make(args.dropout_p, args.rng_state->const_data_ptr<int64_t>(),
                                         params.heads_q, place_of(dropout_place));
  }
}

ScoreParams score_params(double softcap, const OptTensor& alibi_slopes,
                         const OptTensor& learnable_sink, int heads_q) {
  return {.softcap = static_cast<float>(finite_softcap(softcap)),
          .alibi_slopes = alibi_slopes ? alibi_slopes->const_data_ptr<float>() : nullptr,
          .alibi_batch_stride = alibi_slopes && alibi_slopes->dim() == 2 ? heads_q : 0,
          .learnable_sink = learnable_sink ? learnable_sink->const_data_ptr<float>() : nullptr};
}

ScoreParams score_params(const AttnArgs& args) {
  ScoreParams params = score_params(args.softcap, args.alibi_slopes, args.learnable_sink,
                                    static_cast<int>(args.q.size(-2)));
  if (args.attn_bias) {
    params.bias = bias_params(*args.attn_bias, args.is_varlen() ? 0 : args.q.size(1));
  }
  return params;
}

bool is_deterministic(const AttnArgs& args) {
  return args.deterministic || at::globalContext().deterministicAlgorithms();
}

int window_to_params(const c10::SymInt& window) {
  return static_cast<int>(std::min<int64_t>(value(window), int64_t{1} << 30));
}

at::Tensor start_max_logits(const at::Tensor& q, bool wanted) {
  const auto options = q.options().dtype(at::kFloat);
  if (!wanted) return at::empty({0}, options);
  return at::full({q.size(-2)}, -std::numeric_limits<float>::infinity(), options);
}

float* max_logits_pointer(const at::Tensor& max_logits) {
  return max_logits.numel() == 0 ? nullptr : max_logits.data_ptr<float>();
}

}  // namespace flash_attn
