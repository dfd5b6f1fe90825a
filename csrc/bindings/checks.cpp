#include "checks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "argument_checks.h"
#include "mask.h"
#include "pages.h"

namespace flash_attn {

using at::Tensor;
using c10::SymInt;

namespace {

void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, int64_t dims, const char* shape) {
  check_rank("q", q, q, dims, shape);
  check_rank("k", k, q, dims, shape);
  check_dtype_of_q("k", k, q);
  check_rank("v", v, q, dims, shape);
  check_dtype_of_q("v", v, q);
  check_query_dtype(q);
  check_heads(q, "k", k, "v", v);
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
  TORCH_CHECK(args.cu_seqlens_k || args.block_table,
              "flash_attn: cu_seqlens_k: expected with cu_seqlens_q, got none");
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

// Of a block_table, check(FwdArgs) has said all.
void check_attention(const AttnArgs& args) {
  if (args.is_varlen() && !args.block_table) {
    check_qkv(args.q, args.k, args.v, 3, "(total, heads, head_dim) with cu_seqlens_q");
  } else if (!args.block_table) {
    check_qkv(args.q, args.k, args.v, 4, "(batch, seqlen, heads, head_dim)");
  }
  const SymInt batch = check_lengths(args);
  check_int32_vector("seqused_q", args.seqused_q, batch, args.q);
  check_int32_vector("seqused_k", args.seqused_k, batch, args.q);
  check_int32_vector("leftpad_k", args.leftpad_k, batch, args.q);
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
  TORCH_CHECK_NOT_IMPLEMENTED(
      !args.attn.block_table || reads_pages(args),
      "flash_attn: block_table: expected a call whose pages kernels read in place, got another "
      "(flash_attn_varlen_func takes any, and copies the pages first)");
  check_attention(args.attn);
  check_dropout_place(args.dropout_place, args.attn);
}

void check(const BwdArgs& args) {
  TORCH_CHECK_NOT_IMPLEMENTED(!args.attn.block_table,
                              "flash_attn: block_table: expected None in the backward, got a "
                              "tensor");
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
  if (!args.cu_seqlens_k) return;  // pages, of a simulated GPU's tensors
  check_side("max_seqlen_k", args.max_seqlen_k,
             longest(*args.cu_seqlens_k, args.seqused_k, args.leftpad_k, args.k.size(0)));
}

double resolved_scale(std::optional<double> softmax_scale, int64_t head_dim) {
  return softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

}  // namespace flash_attn
