#include "aten/gpu_tiles.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>

#include "aten/gpu.h"
#include "aten/tile.h"
#include "core/architectures.h"

namespace flash_attn::aten {

using at::Tensor;

namespace {

cuda::TensorPart optional_part(const Tensor& x) {
  return x.defined() ? part_of(x) : cuda::TensorPart{};
}

}  // namespace

bool has_kernels(const Tensor& x) {
  const DeviceInfo* const gpu = gpu_of(x);
  return gpu != nullptr && gpu->compute_capability >= 80 &&
         compiled_architectures().code_for(gpu->compute_capability) != 0;
}

cuda::TensorPart part_of(const Tensor& x) {
  const auto stride = [&](int64_t dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  return {.data = x.const_data_ptr(),
          .dtype = x.scalar_type() == at::kBool ? DType::kBool : dtype_of(x),
          .batch = stride(0),
          .head = stride(1),
          .row = stride(2),
          .col = stride(3)};
}

cuda::Rows rows_of(const Tensor& x) {
  return {.x = part_of(x),
          .batch = static_cast<int>(x.size(0)),
          .heads = static_cast<int>(x.size(1)),
          .length = static_cast<int>(x.size(2)),
          .cols = static_cast<int>(x.size(3))};
}

cuda::ScoreTile score_tile(const Slice& slice, Block rows, Block keys) {
  const ScoreTerms& terms = slice.terms;
  const bool offsets = terms.band_offset.defined();
  return {.batch = static_cast<int>(slice.batches.size()),
          .heads_q = static_cast<int>(slice.heads.size()),
          .heads_kv = static_cast<int>(slice.kv_heads.size()),
          .rows = static_cast<int>(rows.size()),
          .keys = static_cast<int>(keys.size()),
          .first_query = rows.first,
          .first_key = keys.first,
          .scores = slice.q.scalar_type() == at::kDouble ? DType::kFp64 : DType::kFp32,
          .operands = dtype_of(slice.q),
          .scale = terms.query_scale(),
          .softcap = terms.softcap,
          .bounded = terms.bounded(),
          .left = terms.band.left,
          .right = terms.band.right,
          .offset = terms.band.offset,
          .offsets = offsets ? terms.band_offset.const_data_ptr<int64_t>() : nullptr,
          .query_exists = optional_part(terms.query_exists),
          .key_exists = optional_part(terms.key_exists),
          .bias = optional_part(terms.bias),
          .slopes = optional_part(terms.alibi_slopes),
          .dropout = terms.dropout_params};
}

Tensor matrices_of(const Tensor& x, int64_t kv_heads) {
  const int64_t matrices = x.size(0) * kv_heads, rows = x.size(1) / kv_heads * x.size(2);
  return x.reshape({matrices, rows, x.size(3)});
}

Tensor wide_product(const Tensor& a, const Tensor& b) {
  const at::ScalarType wide = compute_dtype(a);
  if (a.scalar_type() == wide) return at::bmm(a, b);
  // Only CUDA has products of 16 bits whose result has more.
  return a.is_cuda() ? at::bmm(a, b, wide) : at::bmm(a.to(wide), b.to(wide));
}

void add_wide_product(Tensor acc, const Tensor& a, const Tensor& b) {
  const at::ScalarType wide = acc.scalar_type();
  if (a.scalar_type() == wide) {
    acc.baddbmm_(a, b);
  } else if (a.is_cuda()) {
    at::baddbmm_out(acc, acc, a, b, wide);
  } else {
    acc.baddbmm_(a.to(wide), b.to(wide));
  }
}

SeenOperand::SeenOperand(Tensor x, int64_t kv_heads, bool hides, int64_t first_row)
    : x_(std::move(x)), kv_heads_(kv_heads), first_row_(first_row) {
  if (!hides || x_.numel() == 0) {
    finite_ = x_.contiguous();
    return;
  }
  finite_ = at::empty(x_.sizes(), x_.options());
  bad_ = at::empty(x_.sizes().slice(0, 3), x_.options().dtype(at::kByte));
  cuda::run_keep_finite(rows_of(x_), finite_.data_ptr(), bad_.data_ptr<uint8_t>(), stream_of(x_));
}

Tensor SeenOperand::matrices(Block rows) const {
  return matrices_of(finite_.narrow(2, rows.first - first_row_, rows.size()), kv_heads_);
}

cuda::Rows SeenOperand::rows() const {
  cuda::Rows rows = rows_of(x_);
  if (bad_.defined()) rows.bad = bad_.const_data_ptr<uint8_t>();
  return rows;
}

void SeenOperand::add_product(Tensor& acc, const cuda::ScoreTile& tile, const Tensor& a,
                              const Tensor& b, const Tensor& p, bool of_keys) const {
  const Tensor left = of_keys ? a.transpose(1, 2) : a;
  if (acc.defined()) {
    add_wide_product(acc, left, b);
  } else {
    acc = wide_product(left, b);
  }
  if (!bad_.defined()) return;
  cuda::run_restore(tile,
                    {.acc = acc.data_ptr(),
                     .acc_matrix = acc.stride(0),
                     .acc_row = acc.stride(1),
                     .a = a.const_data_ptr(),
                     .p = p.const_data_ptr(),
                     .b = rows(),
                     .first_row = first_row_,
                     .of_keys = of_keys},
                    stream_of(acc));
}

}  // namespace flash_attn::aten
