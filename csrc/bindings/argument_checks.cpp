#include "argument_checks.h"

#include <c10/util/Exception.h>

#include <array>
#include <cmath>

namespace flash_attn {

using at::Tensor;
using c10::SymInt;

void check_like(const char* name, const Tensor& tensor, const Tensor& q) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized(), "flash_attn: ", name,
              ": expected a dense strided tensor, got layout ", tensor.layout());
  TORCH_CHECK(tensor.device() == q.device(), "flash_attn: ", name, ": expected device ", q.device(),
              " as q has, got ", tensor.device());
}

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
}  // namespace flash_attn
