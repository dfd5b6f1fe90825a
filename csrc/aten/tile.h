// A tile: some rows of q, k, v, … as a matrix, or a batch of matrices, in the dtype that is
// computed in; and products of tiles. A tile has 2 dimensions where there is one matrix, else 3.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <limits>

#include "aten/block_range.h"

namespace flash_attn::aten {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Those positions of dimension `dim`: a view, or x itself if they are all. Of a short sequence
// views take a good part of the time.
at::Tensor narrowed(const at::Tensor& x, int64_t dim, Block positions);

// fp64 stays; fp16, bf16 and fp32 are computed in fp32.
at::ScalarType compute_dtype(const at::Tensor& x);

// (batch, heads, rows, d) as a tile with one matrix for each batch and kv head, and the way back.
// Query heads that share a kv head are more rows of the same matrix:
// (batch · kv heads, heads per kv head · rows, d).
at::Tensor pack(const at::Tensor& x, int64_t matrices);
at::Tensor unpack(const at::Tensor& tile, int64_t batch, int64_t heads);

// Some rows of x (batch, heads, length, d) as a tile.
at::Tensor load_tile(const at::Tensor& x, Block rows, int64_t matrices);

// a b
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

// acc += a b
void add_product(at::Tensor acc, const at::Tensor& a, const at::Tensor& b);

// acc += a b, where a is zero at `masked` and what it meets there in b stays out, NaN and inf too
// (0 · NaN = NaN). Elsewhere NaN and inf of b enter by the rules of floating point.
void add_masked_product(at::Tensor acc, const at::Tensor& a, const at::Tensor& b,
                        const at::Tensor& masked);

// Whether all numbers in these tensors are finite; false where the host would have to wait for a
// device to know.
bool known_finite(std::initializer_list<at::Tensor> tensors);

}  // namespace flash_attn::aten
