#include "checks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "mask.h"

namespace flash_attn {

using at::Tensor;
using c10::SymInt;

void check_like(const char* name, const Tensor& tensor, const Tensor& q) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized(), "flash_attn: ", name,
              ": expected a dense strided tensor, got layout ", tensor.layout());
  TORCH_CHECK(tensor.device() == q.device(), "flash_attn: ", name, ": expected device ", q.device(),
              " as q has, got ", tensor.device());
}

namespace {

void check_rank(const char* name, const Tensor& tensor, const Tensor& q, int64_t dims,
                const char* shape) {
  check_like(name, tensor, q);
  TORCH_CHECK(tensor.dim() == dims, "flash_attn: ", name, ": must have shape ", shape, ", got ",
              tensor.dim(), " dimensions");
}

void check_dtype_of_q(const char* name, const Tensor& tensor, const Tensor& q) {
  TORCH_CHECK(tensor.scalar_type() == q.scalar_type(), "flash_attn: ", name, ": expected dtype ",
              q.scalar_type(), " as q has, got ", tensor.scalar_type());
}

void check_query_dtype(const Tensor& q) {
  const auto dtype = q.scalar_type();
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "flash_attn: q: expected dtype float16, bfloat16, float32 or float64 (GPU kernels only "
      "support fp16 and "
      "bf16 data type), got ",
      dtype);
}

// Heads and head dims of q, k and v, whose ranks are known to be right.
void check_heads(const Tensor& q, const char* k_name, const Tensor& k, const char* v_name,
                 const Tensor& v) {
  const auto check_head_dim = [](const char* name, const Tensor& tensor) {
    TORCH_CHECK(tensor.sym_size(-1) > 0, "flash_attn: ", name,
                ": expected a head_dim of at least 1, got 0");
  };
  check_head_dim("q", q);
  check_head_dim(k_name, k);
  check_head_dim(v_name, v);
  TORCH_CHECK(k.sym_size(-1) == q.sym_size(-1), "flash_attn: ", k_name, ": expected head_dim ",
              q.sym_size(-1), " as q has, got ", k.sym_size(-1));
  const SymInt heads_q = q.sym_size(-2), heads_kv = k.sym_size(-2);
  TORCH_CHECK(v.sym_size(-2) == heads_kv, "flash_attn: ", v_name, ": expected ", heads_kv,
              " heads as ", k_name, " has, got ", v.sym_size(-2));
  TORCH_CHECK(heads_kv > 0 && heads_q % heads_kv == 0, "flash_attn: ", k_name,
              ": number of heads in key/value must divide number of heads in query, got ", heads_kv,
              " and ", heads_q);
}

void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, int64_t dims, const char* shape) {
  check_rank("q", q, q, dims, shape);
  check_rank("k", k, q, dims, shape);
  check_dtype_of_q("k", k, q);
  check_rank("v", v, q, dims, shape);
  check_dtype_of_q("v", v, q);
  check_query_dtype(q);
  check_heads(q, "k", k, "v", v);
}

void check_int32_vector(const char* name, const OptTensor& tensor, const SymInt& size,
                        const Tensor& q) {
  if (!tensor) return;
  TORCH_CHECK(tensor->scalar_type() == at::kInt, "flash_attn: ", name,
              ": expected dtype int32, got ", tensor->scalar_type(), " (convert with .int())");
  check_like(name, *tensor, q);
  TORCH_CHECK(tensor->dim() == 1 && tensor->sym_size(0) == size, "flash_attn: ", name,
              ": must have shape (", size, "), got ", tensor->sym_sizes());
}

void check_alibi(const OptTensor& slopes, const SymInt& batch, const Tensor& q) {
  if (!slopes) return;
  check_like("alibi_slopes", *slopes, q);
  TORCH_CHECK(slopes->scalar_type() == at::kFloat,
              "flash_attn: alibi_slopes: expected dtype float32, got ", slopes->scalar_type());
  const SymInt heads = q.sym_size(-2);
  const bool per_head = slopes->dim() == 1 && slopes->sym_size(0) == heads;
  const bool per_batch =
      slopes->dim() == 2 && slopes->sym_size(0) == batch && slopes->sym_size(1) == heads;
  TORCH_CHECK(per_head || per_batch, "flash_attn: alibi_slopes: must have shape (", heads, ") or (",
              batch, ", ", heads, "), got ", slopes->sym_sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(
      !slopes->requires_grad(),
      "flash_attn: alibi_slopes: has no gradient, expected requires_grad=False, got True");
}

void check_sink(const OptTensor& sink, const Tensor& q) {
  if (!sink) return;
  check_like("learnable_sink", *sink, q);
  TORCH_CHECK(sink->is_floating_point(),
              "flash_attn: learnable_sink: expected a floating dtype, got ", sink->scalar_type());
  TORCH_CHECK(sink->dim() == 1 && sink->sym_size(0) == q.sym_size(-2),
              "flash_attn: learnable_sink: must have shape (", q.sym_size(-2), "), got ",
              sink->sym_sizes());
}

// rows, keys: of a sequence.
void check_bias(const OptTensor& given, const Tensor& q, const SymInt& batch, const SymInt& rows,
                const SymInt& keys) {
  if (!given) return;
  const Tensor& bias = *given;
  check_like("attn_bias", bias, q);
  TORCH_CHECK(bias.is_floating_point() || bias.scalar_type() == at::kBool,
              "flash_attn: attn_bias: expected a floating dtype or bool, got ", bias.scalar_type());
  const std::array<SymInt, 4> full = {batch, q.sym_size(-2), rows, keys};
  bool broadcasts = bias.dim() <= 4;
  for (int64_t d = 1; broadcasts && d <= bias.dim(); ++d) {
    broadcasts = bias.sym_size(-d) == 1 || bias.sym_size(-d) == full[4 - d];
  }
  TORCH_CHECK(broadcasts, "flash_attn: attn_bias: expected a shape that broadcasts to (", full[0],
              ", ", full[1], ", ", full[2], ", ", full[3], "), got ", bias.sym_sizes());
}

void check_scale(std::optional<double> softmax_scale) {
  TORCH_CHECK(!softmax_scale || (std::isfinite(*softmax_scale) && *softmax_scale > 0),
              "flash_attn: softmax_scale: expected a finite number above 0, got ",
              softmax_scale.value_or(0));
}

void check_softcap(double softcap) {
  TORCH_CHECK(std::isfinite(softcap) && softcap >= 0,
              "flash_attn: softcap: expected a finite number of at least 0 (0: off), got ",
              softcap);
}

void check_window(const SymInt& left, const SymInt& right) {
  TORCH_CHECK(left >= -1 && right >= -1,
              "flash_attn: window_size: expected numbers of at least -1 (-1: no limit), got (",
              left, ", ", right, ")");
}

void check_dropout(const AttnArgs& args) {
  TORCH_CHECK(args.dropout_p >= 0 && args.dropout_p < 1,
              "flash_attn: dropout_p: expected a number in [0, 1), got ", args.dropout_p);
  if (args.dropout_p == 0) return;
  TORCH_CHECK(args.rng_state,
              "flash_attn: rng_state: expected a tensor as dropout_p is above 0, got none");
  check_like("rng_state", *args.rng_state, args.q);
  TORCH_CHECK(args.rng_state->scalar_type() == at::kLong && args.rng_state->dim() == 1 &&
                  args.rng_state->sym_size(0) == 2,
              "flash_attn: rng_state: must have shape (2) and dtype int64, got ",
              args.rng_state->sym_sizes(), " and ", args.rng_state->scalar_type());
}

void check_dropout_place(const OptPlace& place, const AttnArgs& args) {
  if (!place) return;
  const std::vector<int64_t>& at = *place;
  // The numbers of heads and the positions are those of 32 bits in the kernels.
  const bool fits = at.size() == 5 && *std::ranges::min_element(at) >= 0 && at[3] % 16 == 0 &&
                    at[4] % 32 == 0 && std::max(at[3], at[4]) <= INT32_MAX && at[2] <= INT32_MAX &&
                    args.q.sym_size(-2) + at[1] <= at[2];
  TORCH_CHECK(
      fits,
      "flash_attn: dropout_place: expected (sequence, head, heads, query, key) of at least 0,"
      " query a multiple of 16, key one of 32, and heads at least head + ",
      args.q.sym_size(-2), ", got ", c10::IntArrayRef(at));
}

SymInt check_lengths(const AttnArgs& args) {
  const auto& [q, k, v] = std::tie(args.q, args.k, args.v);
  if (!args.is_varlen()) {
    TORCH_CHECK(!args.cu_seqlens_k,
                "flash_attn: cu_seqlens_q: expected with cu_seqlens_k, got none");
    const SymInt batch = q.sym_size(0);
    TORCH_CHECK(k.sym_size(0) == batch, "flash_attn: k: expected batch ", batch, " as q has, got ",
                k.sym_size(0));
    TORCH_CHECK(v.sym_size(0) == batch, "flash_attn: v: expected batch ", batch, " as q has, got ",
                v.sym_size(0));
    TORCH_CHECK(v.sym_size(1) == k.sym_size(1), "flash_attn: v: expected seqlen ", k.sym_size(1),
                " as k has, got ", v.sym_size(1));
    TORCH_CHECK(args.max_seqlen_q == q.sym_size(1), "flash_attn: max_seqlen_q: expected ",
                q.sym_size(1), " as q has, got ", args.max_seqlen_q);
    TORCH_CHECK(args.max_seqlen_k == k.sym_size(1), "flash_attn: max_seqlen_k: expected ",
                k.sym_size(1), " as k has, got ", args.max_seqlen_k);
    return batch;
  }
  TORCH_CHECK(args.cu_seqlens_k, "flash_attn: cu_seqlens_k: expected with cu_seqlens_q, got none");
  TORCH_CHECK(v.sym_size(0) == k.sym_size(0), "flash_attn: v: expected ", k.sym_size(0),
              " tokens as k has, got ", v.sym_size(0));
  TORCH_CHECK(args.cu_seqlens_q->dim() == 1 && args.cu_seqlens_q->sym_size(0) >= 1,
              "flash_attn: cu_seqlens_q: must have shape (batch + 1), got ",
              args.cu_seqlens_q->sym_sizes());
  check_int32_vector("cu_seqlens_q", args.cu_seqlens_q, args.cu_seqlens_q->sym_size(0), q);
  check_int32_vector("cu_seqlens_k", args.cu_seqlens_k, args.cu_seqlens_q->sym_size(0), q);
  TORCH_CHECK(args.max_seqlen_q >= 0, "flash_attn: max_seqlen_q: expected at least 0, got ",
              args.max_seqlen_q);
  TORCH_CHECK(args.max_seqlen_k >= 0, "flash_attn: max_seqlen_k: expected at least 0, got ",
              args.max_seqlen_k);
  return args.cu_seqlens_q->sym_size(0) - 1;
}

void check_attention(const AttnArgs& args) {
  if (args.is_varlen()) {
    check_qkv(args.q, args.k, args.v, 3, "(total, heads, head_dim) with cu_seqlens_q");
  } else {
    check_qkv(args.q, args.k, args.v, 4, "(batch, seqlen, heads, head_dim)");
  }
  const SymInt batch = check_lengths(args);
  check_int32_vector("seqused_q", args.seqused_q, batch, args.q);
  check_int32_vector("seqused_k", args.seqused_k, batch, args.q);
  check_int32_vector("leftpad_k", args.leftpad_k, batch, args.q);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !args.block_table,
      "flash_attn: block_table: expected None (paged keys are served by flash_decode_func and "
      "flash_attn_with_kvcache), got a tensor");
  check_bias(args.attn_bias, args.q, batch, args.max_seqlen_q, args.max_seqlen_k);
  check_mask(args, batch);
  check_alibi(args.alibi_slopes, batch, args.q);
  check_sink(args.learnable_sink, args.q);
  check_dropout(args);
  check_scale(args.softmax_scale);
  check_softcap(args.softcap);
  check_window(args.window_left, args.window_right);
}

}  // namespace

void check(const FwdArgs& args) {
  check_attention(args.attn);
  check_dropout_place(args.dropout_place, args.attn);
}

void check(const BwdArgs& args) {
  check_attention(args.attn);
  check_dropout_place(args.dropout_place, args.attn);
  const Tensor& q = args.attn.q;
  const auto check_out_like = [&](const char* name, const Tensor& tensor) {
    check_like(name, tensor, q);
    bool matches = tensor.dim() == q.dim() && tensor.scalar_type() == q.scalar_type() &&
                   tensor.sym_size(-1) == args.attn.v.sym_size(-1);
    for (int64_t d = 0; matches && d + 1 < q.dim(); ++d)
      matches = tensor.sym_size(d) == q.sym_size(d);
    TORCH_CHECK(matches, "flash_attn: ", name, ": expected the shape of q with head_dim ",
                args.attn.v.sym_size(-1), " and dtype ", q.scalar_type(), ", got ",
                tensor.sym_sizes(), " and ", tensor.scalar_type());
  };
  check_out_like("dout", args.dout);
  check_out_like("out", args.out);
  const auto check_lse_like = [&](const char* name, const Tensor& tensor) {
    check_like(name, tensor, q);
    const bool varlen = args.attn.is_varlen();
    const bool matches = varlen ? tensor.dim() == 2 && tensor.sym_size(0) == q.sym_size(1) &&
                                      tensor.sym_size(1) == q.sym_size(0)
                                : tensor.dim() == 3 && tensor.sym_size(0) == q.sym_size(0) &&
                                      tensor.sym_size(1) == q.sym_size(2) &&
                                      tensor.sym_size(2) == q.sym_size(1);
    TORCH_CHECK(matches, "flash_attn: ", name, ": must have shape ",
                varlen ? "(heads, total_q)" : "(batch, heads, seqlen_q)", ", got ",
                tensor.sym_sizes());
    const auto dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    TORCH_CHECK(tensor.scalar_type() == dtype, "flash_attn: ", name, ": expected dtype ", dtype,
                ", got ", tensor.scalar_type());
  };
  check_lse_like("softmax_lse", args.softmax_lse);
  if (args.dlse) check_lse_like("dlse", *args.dlse);
}

namespace {

// The longest of the segments that cu_seqlens cuts `total` rows into, of which `used` count and
// `pad` are skipped.
int64_t longest(const Tensor& cu_seqlens, const OptTensor& used, const OptTensor& pad,
                int64_t total) {
  const auto numbers = [](const OptTensor& x) { return x ? x->contiguous() : Tensor(); };
  const Tensor bounds = cu_seqlens.contiguous(), counts = numbers(used), skipped = numbers(pad);
  const auto bound = [&](int64_t b) {
    return std::clamp<int64_t>(bounds.const_data_ptr<int32_t>()[b], 0, total);
  };
  int64_t result = 0;
  for (int64_t b = 0; b + 1 < bounds.size(0); ++b) {
    int64_t length = bound(b + 1) - bound(b);
    if (used) length = std::min<int64_t>(length, counts.const_data_ptr<int32_t>()[b]);
    if (pad) length -= std::max(skipped.const_data_ptr<int32_t>()[b], 0);
    result = std::max(result, length);
  }
  return result;
}

}  // namespace

void check_max_seqlens(const AttnArgs& args) {
  if (!args.is_varlen() || !args.q.is_cpu()) return;
  const auto check_side = [](const char* name, const SymInt& max_seqlen, int64_t needed) {
    TORCH_CHECK(max_seqlen >= needed, "flash_attn: ", name, ": expected at least ", needed,
                " (the longest sequence), got ", max_seqlen);
  };
  check_side("max_seqlen_q", args.max_seqlen_q,
             longest(*args.cu_seqlens_q, args.seqused_q, std::nullopt, args.q.size(0)));
  check_side("max_seqlen_k", args.max_seqlen_k,
             longest(*args.cu_seqlens_k, args.seqused_k, args.leftpad_k, args.k.size(0)));
}

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

double resolved_scale(std::optional<double> softmax_scale, int64_t head_dim) {
  return softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

}  // namespace flash_attn
