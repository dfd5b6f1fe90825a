#include "aten/cache.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>

#include "aten/gpu_tiles.h"
#include "aten/parallel.h"
#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

Cache::Cache(const DecodeArgs& args)
    : args_(args),
      int64_(args.q.options().dtype(at::kLong)),
      page_size_(args.k_cache.size(1)),
      capacity_(page_size_ * (args.block_table ? args.block_table->size(1) : 1)) {
  if (args.k_cache.size(0) == 0) capacity_ = 0;
  const int64_t batch = args.q.size(0);
  if (!args.cache_batch_idx) {
    if (args.block_table) table_ = *args.block_table;
  } else if (!args.block_table) {
    table_ = args.cache_batch_idx->unsqueeze(-1);
  } else {
    const int64_t rows = args.block_table->size(0);
    if (rows == 0) capacity_ = 0;
    const Tensor row = args.cache_batch_idx->to(at::kLong);
    const Tensor missing = row.lt(0).logical_or_(row.ge(rows)).unsqueeze(-1);
    table_ =
        capacity_ == 0
            ? at::zeros({batch, 0}, int64_)
            : args.block_table->index_select(0, row.clamp(0, rows - 1)).masked_fill_(missing, -1);
  }
}

Tensor Cache::lengths() const {
  if (!args_.cache_seqlens) return at::full({args_.q.size(0)}, capacity_, int64_);
  return args_.cache_seqlens->to(at::kLong).clamp(0, capacity_);
}

Tensor Cache::leftpad() const {
  if (!args_.leftpad_k) return at::zeros({args_.q.size(0)}, int64_);
  return at::minimum(args_.leftpad_k->to(at::kLong).clamp_min(0), lengths());
}

Cache::Places Cache::places(Block batches, const Tensor& position) const {
  const int64_t pages = args_.k_cache.size(0);
  const Tensor inside = position.clamp(0, capacity_ - 1);
  const Tensor table =
      table_.defined() ? table_ : at::arange(args_.q.size(0), int64_).unsqueeze(-1);
  const Tensor page =
      table.narrow(0, batches.first, batches.size())
          .gather(1, inside.floor_divide(page_size_).expand({batches.size(), position.size(1)}))
          .to(at::kLong);
  const Tensor exists = page.ge(0).logical_and_(page.lt(pages)).logical_and_(inside.eq(position));
  return {page.clamp(0, pages - 1), inside.remainder(page_size_).expand_as(page), exists};
}

bool Cache::all_exist(int64_t batch, Block positions) const {
  if (positions.size() == 0 || full()) return true;
  if (!table_.defined()) return batch < args_.k_cache.size(0);
  const int64_t first = positions.first / page_size_, last = (positions.last - 1) / page_size_;
  const Tensor pages = table_.select(0, batch).narrow(0, first, last - first + 1);
  return pages.ge(0).logical_and_(pages.lt(args_.k_cache.size(0))).all().item<bool>();
}

std::pair<Tensor, Tensor> Cache::tiles(Block batches, Block kv_heads, Block positions,
                                       const Places* places) const {
  return {tile(args_.k_cache, args_.k_descale, batches, kv_heads, positions, places),
          tile(args_.v_cache, args_.v_descale, batches, kv_heads, positions, places)};
}

Tensor Cache::tile(const Tensor& cache, const std::optional<Tensor>& descale, Block batches,
                   Block kv_heads, Block positions, const Places* places) const {
  const at::ScalarType dtype = tile_dtype();
  Tensor x = rows(cache.narrow(2, kv_heads.first, kv_heads.size()), batches, positions, places)
                 .transpose(1, 2)
                 .to(dtype);
  if (descale) x = x * descale_factors(*descale, batches, kv_heads, dtype);
  return pack(x, batches.size() * kv_heads.size());
}

at::ScalarType Cache::tile_dtype() const {
  const bool as_stored = has_kernels(args_.q) && args_.k_cache.element_size() > 1;
  return as_stored ? args_.q.scalar_type() : compute_dtype(args_.q);
}

Tensor Cache::rows(const Tensor& cache, Block batches, Block positions,
                   const Places* places) const {
  const int64_t column = positions.first / page_size_, slot = positions.first % page_size_;
  if (!args_.block_table && !args_.cache_batch_idx) {
    return cache.narrow(0, batches.first, batches.size()).narrow(1, slot, positions.size());
  }
  if (host_reads(args_.q) && batches.size() == 1) {
    const int64_t count = (positions.last - 1) / page_size_ - column + 1;
    const Tensor pages =
        table_.select(0, batches.first).narrow(0, column, count).clamp(0, cache.size(0) - 1);
    if (count == 1) {
      return cache.narrow(0, pages.item<int64_t>(), 1).narrow(1, slot, positions.size());
    }
    // Whole pages are copied several times as fast as rows on a CPU, but a page may be far longer
    // than what is wanted of it.
    if (page_size_ <= positions.size()) {
      const Tensor whole = as_bytes(cache).index_select(0, pages).view(cache.scalar_type());
      return whole.flatten(0, 1).narrow(0, slot, positions.size()).unsqueeze(0);
    }
  }
  if (places != nullptr) {
    const auto of_block = [&](const Tensor& x) {
      return x.narrow(1, positions.first, positions.size());
    };
    return at::index(as_bytes(cache), {of_block(places->page), of_block(places->slot)})
        .view(cache.scalar_type());
  }
  const Tensor position = at::arange(positions.first, positions.last, int64_).unsqueeze(0);
  const Places at = this->places(batches, position);
  return at::index(as_bytes(cache), {at.page, at.slot}).view(cache.scalar_type());
}

Tensor as_bytes(const Tensor& x) { return x.element_size() == 1 ? x.view(at::kByte) : x; }

Tensor descale_factors(const Tensor& descale, Block batches, Block kv_heads, at::ScalarType dtype) {
  Tensor factors =
      descale.dim() == 1 ? descale.unsqueeze(0) : descale.narrow(0, batches.first, batches.size());
  factors = factors.narrow(1, kv_heads.first, kv_heads.size()).to(dtype);
  return factors.unsqueeze(-1).unsqueeze(-1);
}

}  // namespace flash_attn::aten
