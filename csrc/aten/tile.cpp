#include "aten/tile.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "aten/parallel.h"

namespace flash_attn::aten {

using at::Tensor;

Tensor narrowed(const Tensor& x, int64_t dim, Block positions) {
  return positions.size() == x.size(dim) ? x : x.narrow(dim, positions.first, positions.size());
}

at::ScalarType compute_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor pack(const Tensor& x, int64_t matrices) {
  // The stride of a single column may be any number, and torch chooses by strides how it
  // multiplies: each way adds in an order of its own. reshape itself sets those of a single row or
  // matrix.
  if (x.size(3) == 1 && x.stride(3) != 1) return pack(x.select(3, 0).unsqueeze(3), matrices);
  const int64_t height = x.size(0) * x.size(1) / matrices * x.size(2);
  return matrices == 1 ? x.reshape({height, x.size(3)}) : x.reshape({matrices, height, x.size(3)});
}

Tensor unpack(const Tensor& tile, int64_t batch, int64_t heads) {
  const int64_t rows = (tile.dim() == 3 ? tile.size(0) : 1) * tile.size(-2) / (batch * heads);
  return tile.view({batch, heads, rows, tile.size(-1)});
}

Tensor load_tile(const Tensor& x, Block rows, int64_t matrices) {
  return pack(narrowed(x, 2, rows).to(compute_dtype(x)), matrices);
}

Tensor product(const Tensor& a, const Tensor& b) {
  return a.dim() == 2 ? at::mm(a, b) : at::bmm(a, b);
}

void add_product(Tensor acc, const Tensor& a, const Tensor& b) {
  a.dim() == 2 ? acc.addmm_(a, b) : acc.baddbmm_(a, b);
}

bool known_finite(std::initializer_list<Tensor> tensors) {
  // A sum is NaN or inf if one of its numbers is (and if it overflows, which then costs time only).
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& x) {
    return host_reads(x) && std::isfinite(x.sum().item<double>());
  });
}

void add_masked_product(Tensor acc, const Tensor& a, const Tensor& b, const Tensor& masked) {
  const Tensor finite = at::isfinite(b);
  const Tensor attended = masked.logical_not().to(a.scalar_type());
  const Tensor infinity_sign = at::where(at::isinf(b), b.sign(), 0.0);

  // How many non-finite numbers enter each sum, and whether they all pull to the same infinity.
  const Tensor count = product(attended, finite.logical_not().to(a.scalar_type()));
  const Tensor pull = product(a.sign(), infinity_sign);
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const Tensor same_sign = at::where(pull == count, kInf, at::where(pull == -count, -kInf, kNaN));

  add_product(acc, a, at::where(finite, b, 0.0));
  acc.add_(at::where(count == 0, 0.0, same_sign));
}

}  // namespace flash_attn::aten
