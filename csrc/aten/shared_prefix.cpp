#include "aten/shared_prefix.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

namespace flash_attn::aten {

using at::Tensor;

namespace {

// Row index[b] of the table for each b; -1 throughout where there is no such row.
Tensor pick_rows(const Tensor& table, const Tensor& index) {
  const int64_t rows = table.size(0);
  if (rows == 0) return at::full({index.size(0), table.size(1)}, -1, table.options());
  const Tensor missing = index.lt(0).logical_or_(index.ge(rows)).unsqueeze(-1);
  return table.index_select(0, index.clamp(0, rows - 1)).masked_fill_(missing, -1);
}

}  // namespace

Tensor unshared_table(const Tensor& table, const std::optional<Tensor>& rows, const Tensor& source,
                      const Tensor& lens, int64_t page_size) {
  const Tensor own = rows ? pick_rows(table, *rows) : table;
  const Tensor ends = at::arange(1, table.size(1) + 1, lens.options().dtype(at::kLong)) * page_size;
  return at::where(ends.le(lens.unsqueeze(-1)), pick_rows(own, source), own);
}

}  // namespace flash_attn::aten
