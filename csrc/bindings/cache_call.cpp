#include "cache_call.h"

#include "checks.h"

namespace flash_attn {
namespace {

template <typename T>
const T* pointer(const OptTensor& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

}  // namespace

CacheCall cache_call(const CallShape& shape, const DecodeArgs& given, const KvcacheArgs* tokens) {
  CacheCall call = {.args = given, .params = {}};
  DecodeArgs& args = call.args;
  args.q = readable(args.q);
  args.k_cache = readable(args.k_cache);
  args.v_cache = readable(args.v_cache);
  for (OptTensor* tensor :
       {&args.cache_seqlens, &args.cache_batch_idx, &args.leftpad_k, &args.block_table,
        &args.alibi_slopes, &args.prefix_source, &args.prefix_lens}) {
    *tensor = contiguous(*tensor);
  }
  if (args.learnable_sink) {
    args.learnable_sink = args.learnable_sink->to(at::kFloat).contiguous();
  }
  if (args.attn_bias) {
    // Beside 8 bits the kernels' products have a dtype that is not q's.
    const at::ScalarType third = is_quantized(args.k_cache) ? at::kFloat : args.q.scalar_type();
    args.attn_bias = readable_bias(*args.attn_bias, third);
  }
  if (args.tree_mask) {
    // One for all heads.
    const at::Tensor& tree = *args.tree_mask;
    args.tree_mask = readable_bias(tree.dim() == 3 ? tree.unsqueeze(1) : tree, at::kBool);
  }
  const auto batch_stride = [](const OptTensor& descale) {
    return descale && descale->dim() == 2 ? descale->stride(0) : 0;
  };
  const auto head_stride = [](const OptTensor& descale) {
    return descale ? descale->stride(-1) : 0;
  };
  const bool rotates = tokens != nullptr && tokens->rotary_cos && tokens->rotary_cos->size(1) > 0;
  call.params = {.k_cache = args.k_cache.const_data_ptr(),
                 .v_cache = args.v_cache.const_data_ptr(),
                 .k_strides = strides_of(args.k_cache),
                 .v_strides = strides_of(args.v_cache),
                 .cache_dtype = shape.cache_dtype,
                 .cache_rows = static_cast<int>(args.k_cache.size(0)),
                 .capacity = static_cast<int>(shape.capacity),
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
                 .dtype = shape.dtype,
                 .batch = static_cast<int>(args.q.size(0)),
                 .heads_kv = static_cast<int>(args.k_cache.size(2)),
                 .head_dim = static_cast<int>(args.q.size(3)),
                 .head_dim_v = static_cast<int>(args.v_cache.size(3))};
  return call;
}

}  // namespace flash_attn
