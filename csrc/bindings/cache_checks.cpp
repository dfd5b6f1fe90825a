// What calls against a cache are checked for.
#include <c10/util/Exception.h>

#include "argument_checks.h"
#include "checks.h"

namespace flash_attn {

using at::Tensor;
using c10::SymInt;

namespace {

// q against caches of its own dtype, or of 8 bits with one scale a head.
void check_caches(const DecodeArgs& args) {
  const auto& [q, k, v] = std::tie(args.q, args.k_cache, args.v_cache);
  check_rank("q", q, q, 4, "(batch, seqlen, heads, head_dim)");
  constexpr const char* kShape =
      "(batch, capacity, heads, head_dim), or (num_pages, page_size, heads, head_dim)";
  check_rank("k_cache", k, q, 4, kShape);
  check_rank("v_cache", v, q, 4, kShape);
  check_query_dtype(q);
  const auto dtype = k.scalar_type();
  TORCH_CHECK(dtype == q.scalar_type() || is_quantized(k), "flash_attn: k_cache: expected dtype ",
              q.scalar_type(), " as q has, float8_e4m3fn or int8, got ", dtype);
  TORCH_CHECK(v.scalar_type() == dtype, "flash_attn: v_cache: expected dtype ", dtype,
              " as k_cache has, got ", v.scalar_type());
  check_heads(q, "k_cache", k, "v_cache", v);
  TORCH_CHECK(v.sym_size(0) == k.sym_size(0) && v.sym_size(1) == k.sym_size(1),
              "flash_attn: v_cache: expected batch and capacity ", k.sym_size(0), " and ",
              k.sym_size(1), " as k_cache has, got ", v.sym_size(0), " and ", v.sym_size(1));
}

// Without cache_batch_idx sequence b is row b of the cache, or of block_table.
void check_rows_of_cache(const DecodeArgs& args, const SymInt& batch) {
  check_int32_vector("cache_batch_idx", args.cache_batch_idx, batch, args.q);
  if (args.block_table) {
    const Tensor& table = *args.block_table;
    check_like("block_table", table, args.q);
    TORCH_CHECK(table.scalar_type() == at::kInt,
                "flash_attn: block_table: expected dtype int32, got ", table.scalar_type());
    TORCH_CHECK(table.dim() == 2 && (args.cache_batch_idx || table.sym_size(0) == batch),
                "flash_attn: block_table: must have shape (", batch,
                ", max_pages) without cache_batch_idx, got ", table.sym_sizes());
  } else {
    TORCH_CHECK(args.cache_batch_idx || args.k_cache.sym_size(0) == batch,
                "flash_attn: k_cache: expected batch ", batch,
                " as q has without cache_batch_idx, got ", args.k_cache.sym_size(0));
  }
}

void check_shared_prefix(const DecodeArgs& args, const SymInt& batch) {
  TORCH_CHECK(args.prefix_source.has_value() == args.prefix_lens.has_value(),
              "flash_attn: shared_prefix: expected source and lens together, got one of them");
  if (!args.prefix_source) return;
  TORCH_CHECK(args.block_table, "flash_attn: shared_prefix: expected with block_table, got None");
  check_int32_vector("shared_prefix.source", args.prefix_source, batch, args.q);
  check_int32_vector("shared_prefix.lens", args.prefix_lens, batch, args.q);
}

void check_tree(const DecodeArgs& args, const SymInt& batch) {
  if (!args.tree_mask) return;
  const Tensor& tree = *args.tree_mask;
  TORCH_CHECK(!args.attn_bias,
              "flash_attn: tree_mask: expected without attn_bias, which can hold it, got both");
  check_like("tree_mask", tree, args.q);
  TORCH_CHECK(tree.scalar_type() == at::kBool, "flash_attn: tree_mask: expected dtype bool, got ",
              tree.scalar_type());
  const SymInt tokens = args.q.sym_size(1);
  const bool fits = (tree.dim() == 2 || (tree.dim() == 3 && tree.sym_size(0) == batch)) &&
                    tree.sym_size(-2) == tokens && tree.sym_size(-1) == tokens;
  TORCH_CHECK(fits, "flash_attn: tree_mask: must have shape (", tokens, ", ", tokens, ") or (",
              batch, ", ", tokens, ", ", tokens, "), got ", tree.sym_sizes());
}

void check_descale(const char* name, const OptTensor& descale, const DecodeArgs& args) {
  if (!descale) return;
  check_like(name, *descale, args.q);
  TORCH_CHECK(is_quantized(args.k_cache), "flash_attn: ", name,
              ": expected with a cache of float8_e4m3fn or int8, got one of ",
              args.k_cache.scalar_type());
  TORCH_CHECK(descale->scalar_type() == at::kFloat, "flash_attn: ", name,
              ": expected dtype float32, got ", descale->scalar_type());
  const SymInt batch = args.q.sym_size(0), heads_kv = args.k_cache.sym_size(2);
  const bool per_head = descale->dim() == 1 && descale->sym_size(0) == heads_kv;
  const bool per_sequence =
      descale->dim() == 2 && descale->sym_size(0) == batch && descale->sym_size(1) == heads_kv;
  TORCH_CHECK(per_head || per_sequence, "flash_attn: ", name, ": must have shape (", heads_kv,
              ") or (", batch, ", ", heads_kv, "), got ", descale->sym_sizes());
}

void check_appended(const char* name, const Tensor& tensor, const char* cache_name,
                    const Tensor& cache, const SymInt& seqlen_new, const Tensor& q) {
  const bool matches = tensor.dim() == 4 && tensor.sym_size(0) == q.sym_size(0) &&
                       tensor.sym_size(1) == seqlen_new &&
                       tensor.sym_size(2) == cache.sym_size(2) &&
                       tensor.sym_size(3) == cache.sym_size(3);
  TORCH_CHECK(matches, "flash_attn: ", name, ": must have shape (", q.sym_size(0), ", ", seqlen_new,
              ", ", cache.sym_size(2), ", ", cache.sym_size(3), ") to go into ", cache_name,
              ", got ", tensor.sym_sizes());
  check_like(name, tensor, q);
  check_dtype_of_q(name, tensor, q);
}

void check_rotary(const char* name, const Tensor& table, const KvcacheArgs& args) {
  const Tensor& q = args.decode.q;
  check_like(name, table, q);
  check_dtype_of_q(name, table, q);
  TORCH_CHECK(table.dim() == 2 && table.sym_size(1) * 2 <= q.sym_size(3), "flash_attn: ", name,
              ": must have shape (rows, rotary_dim / 2) with rotary_dim at most ", q.sym_size(3),
              ", got ", table.sym_sizes());
  const SymInt capacity = args.decode.capacity();
  TORCH_CHECK(table.sym_size(0) >= capacity, "flash_attn: ", name, ": expected at least ", capacity,
              " rows (the cache's capacity), got ", table.sym_size(0));
}

}  // namespace

bool is_quantized(const Tensor& cache) {
  return cache.scalar_type() == at::kFloat8_e4m3fn || cache.scalar_type() == at::kChar;
}

void check(const DecodeArgs& args) {
  check_caches(args);
  const SymInt batch = args.q.sym_size(0);
  check_shared_prefix(args, batch);
  check_rows_of_cache(args, batch);
  check_int32_vector("cache_seqlens", args.cache_seqlens, batch, args.q);
  check_int32_vector("cache_leftpad", args.leftpad_k, batch, args.q);
  check_alibi(args.alibi_slopes, batch, args.q);
  check_bias(args.attn_bias, args.q, batch, args.q.sym_size(1), args.capacity());
  check_tree(args, batch);
  check_sink(args.learnable_sink, args.q);
  check_descale("k_descale", args.k_descale, args);
  check_descale("v_descale", args.v_descale, args);
  check_scale(args.softmax_scale);
  check_softcap(args.softcap);
  check_window(args.window_left, args.window_right);
  TORCH_CHECK(args.num_splits >= 0 && args.num_splits <= 256,
              "flash_attn: num_splits: expected 0 (chosen) to 256, got ", args.num_splits);
}

void check(const KvcacheArgs& args) {
  const DecodeArgs& decode = args.decode;
  check(decode);
  const SymInt seqlen_new = args.k.dim() == 4 ? args.k.sym_size(1) : SymInt(0);
  check_appended("k", args.k, "k_cache", decode.k_cache, seqlen_new, decode.q);
  check_appended("v", args.v, "v_cache", decode.v_cache, seqlen_new, decode.q);
  const SymInt capacity = decode.capacity();
  TORCH_CHECK(seqlen_new <= capacity, "flash_attn: k: expected at most ", capacity,
              " new tokens (the capacity), got ", seqlen_new);
  TORCH_CHECK(args.rotary_cos.has_value() == args.rotary_sin.has_value(),
              "flash_attn: rotary_sin: expected rotary_cos and rotary_sin together, got one of "
              "them");
  if (!args.rotary_cos) return;
  check_rotary("rotary_cos", *args.rotary_cos, args);
  check_rotary("rotary_sin", *args.rotary_sin, args);
  TORCH_CHECK(args.rotary_sin->sym_size(0) == args.rotary_cos->sym_size(0) &&
                  args.rotary_sin->sym_size(1) == args.rotary_cos->sym_size(1),
              "flash_attn: rotary_sin: must have shape ", args.rotary_cos->sym_sizes(),
              " as rotary_cos has, got ", args.rotary_sin->sym_sizes());
}
}  // namespace flash_attn
