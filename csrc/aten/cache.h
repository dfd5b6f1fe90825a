// Where the keys of each sequence lie in the caches of a decode call: position p of sequence b is
// slot p % page_size of page table[b][p / page_size]. An unpaged cache has one page a row, as long
// as its capacity. The index tensors may hold anything: what they name outside the cache does not
// exist.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "aten/attention.h"
#include "aten/block_range.h"

namespace flash_attn::aten {

class Cache {
 public:
  explicit Cache(const DecodeArgs& args);

  // The positions that a sequence has room for.
  int64_t capacity() const { return capacity_; }
  // Whether all positions of all sequences hold a key, whatever device the call is on.
  bool full() const {
    return !args_.cache_seqlens && !args_.leftpad_k && !args_.block_table && !args_.cache_batch_idx;
  }

  // cache_seqlens and leftpad_k as int64 (batch), clamped to what can be.
  at::Tensor lengths() const;
  at::Tensor leftpad() const;

  struct Places {
    at::Tensor page, slot;  // int64, inside the cache in any case
    at::Tensor exists;      // bool
  };
  // position: int64 (batches or 1, n). Shaped (batches, n); there must be a page.
  Places places(Block batches, const at::Tensor& position) const;
  // Whether all of these positions of one sequence exist; the host reads the table.
  bool all_exist(int64_t batch, Block positions) const;

  // What the products with keys and values are of: that which q is computed in, but on a GPU 16 bits
  // where the cache has them.
  at::ScalarType tile_dtype() const;
  // Some keys and values as tiles (tile.h) of that dtype. places: of these batches' positions from 0
  // on, if known.
  std::pair<at::Tensor, at::Tensor> tiles(Block batches, Block kv_heads, Block positions,
                                          const Places* places = nullptr) const;

 private:
  at::Tensor tile(const at::Tensor& cache, const std::optional<at::Tensor>& descale, Block batches,
                  Block kv_heads, Block positions, const Places* places) const;
  // The same positions of these sequences, (batches, n, heads, d): a view where they lie together.
  at::Tensor rows(const at::Tensor& cache, Block batches, Block positions,
                  const Places* places) const;

  const DecodeArgs& args_;
  at::TensorOptions int64_;
  at::Tensor table_;  // int32 or int64 (batch, pages of a sequence); undefined: a row each
  int64_t page_size_, capacity_;
};

// An 8-bit tensor as bytes, which every indexing operation takes; others as they are.
at::Tensor as_bytes(const at::Tensor& x);

// (heads) or (batch, heads) as (1 or batches, heads, 1, 1) of that dtype.
at::Tensor descale_factors(const at::Tensor& descale, Block batches, Block kv_heads,
                           at::ScalarType dtype);

}  // namespace flash_attn::aten
