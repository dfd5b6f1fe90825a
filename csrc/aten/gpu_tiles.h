// aten on a GPU: ATen's matrix products, and what lies between them in kernels of one pass
// (cuda/score_tile.h, cuda/operand_rows.h). A tile is (batch · kv heads, heads per kv head · rows,
// keys), its scores fp32 or fp64; operands of products keep 16 bits where the call has them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>

#include "aten/block_range.h"
#include "aten/grads.h"
#include "aten/online_softmax.h"
#include "aten/slice.h"
#include "cuda/operand_rows.h"
#include "cuda/score_tile.h"

namespace flash_attn::aten {

// Whether this build's kernels run where the tensor lies.
bool has_kernels(const at::Tensor& x);

// A tensor (batch, heads, length, d), or (batch, heads, length, 1), as kernels read it.
cuda::TensorPart part_of(const at::Tensor& x);
cuda::Rows rows_of(const at::Tensor& x);
// Those scores of a slice.
cuda::ScoreTile score_tile(const Slice& slice, Block rows, Block keys);

// x (batch, heads, length, d) as (batch · kv heads, rows, d): a view where its strides allow it,
// as those of a contiguous tensor and of some rows of one do where heads share no kv head.
at::Tensor matrices_of(const at::Tensor& x, int64_t kv_heads);
// a b in the dtype of scores, and acc += a b.
at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b);
void add_wide_product(at::Tensor acc, const at::Tensor& a, const at::Tensor& b);

// An operand of products with a tile in which keys may be hidden: NaN and inf of it enter the rows
// that see them, and no others.
class SeenOperand {
 public:
  SeenOperand() = default;
  // x (batch, heads, length, d), whose first row is that of a position. hides: whether anything may
  // be hidden; else x is taken as it is.
  SeenOperand(at::Tensor x, int64_t kv_heads, bool hides, int64_t first_row = 0);

  // Some rows, by position, as (batch · kv heads, rows, d): without what is not finite where anything
  // may be hidden.
  at::Tensor matrices(Block rows) const;
  // acc += a b, where a and p are tiles of `tile`, and b is matrices() of the tile's rows. of_keys:
  // acc's rows are keys, and it is aᵀ b. acc undefined: becomes the product.
  void add_product(at::Tensor& acc, const cuda::ScoreTile& tile, const at::Tensor& a,
                   const at::Tensor& b, const at::Tensor& p, bool of_keys) const;
  cuda::Rows rows() const;  // with what is not finite

 private:
  at::Tensor x_, finite_;  // finite_: contiguous, x itself where nothing is hidden
  at::Tensor bad_;         // rows of x that are not finite; undefined where nothing is hidden
  int64_t kv_heads_ = 1, first_row_ = 0;
};

// attend() on a GPU. load: the keys of a block, (batch · kv heads, keys, d), and V as an operand that
// has them.
struct SeenKeys {
  int64_t head_dim_v;
  std::function<std::pair<at::Tensor, SeenOperand>(Block keys)> load;
};
// S_dmask. of_step: where it is written in rows' only step; or undefined.
struct Probabilities {
  bool wanted = false;
  at::Tensor of_step;
};
OnlineSoftmax attend_on_gpu(const Slice& slice, const SeenKeys& seen, Block rows, Block keys,
                            const Probabilities& probabilities = {});

// O and LSE of these rows of a slice to their places in its part of the results.
void finish_rows(const Slice& slice, Block rows, const OnlineSoftmax& state, const at::Tensor& out,
                 const at::Tensor& lse);

// fwd() and bwd() of a slice that is the whole call. out, lse, dout, …: (batch, heads, length, d or
// 1). probabilities: S_dmask, or undefined.
void fwd_on_gpu(const Slice& slice, const at::Tensor& out, const at::Tensor& lse,
                const at::Tensor& max_logits, const at::Tensor& probabilities);
void bwd_on_gpu(const Slice& slice, const GradMask& need, const SavedRows& saved,
                const SliceGrads& grads);

}  // namespace flash_attn::aten
