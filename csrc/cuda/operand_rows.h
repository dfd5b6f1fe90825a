// Rows of tensors as operands of aten's products on a GPU (aten/gpu_tiles.h).
#pragma once

#include "score_tile.h"

namespace flash_attn::cuda {

// Rows of a tensor. bad: (batch, heads, length), which of them are not finite; or null.
struct Rows {
  TensorPart x;
  int batch = 0, heads = 0, length = 0, cols = 0;
  const uint8_t* bad = nullptr;
};

// Rows of a tensor as an operand whose product a hidden key takes no part in: 0 · NaN is NaN, so
// what is not finite becomes 0, and is added again where it is seen, by run_restore(). finite: like
// rows.x, contiguous. bad: Rows', written.
void run_keep_finite(const Rows& rows, void* finite, uint8_t* bad, Stream stream);

// acc += a b for those numbers of b that are not finite, by the rules of floating point. a and
// p: tiles. of_keys: the rows of acc are a tile's keys and b's are its queries; else the other way
// round.
struct Restore {
  void* acc = nullptr;  // (matrices, rows, b.cols) of the scores' dtype
  int64_t acc_matrix = 0, acc_row = 0;
  const void *a = nullptr, *p = nullptr;
  Rows b;
  int64_t first_row = 0;  // of b, where positions count from
  bool of_keys = false;
};
void run_restore(const ScoreTile& tile, const Restore& restore, Stream stream);

// A tile of products a bᵀ: those of a bad row of a or b are taken again, of all its numbers, where
// the operands were what run_keep_finite() leaves. A product stays with its row and key, so that one
// with a hidden key may be anything.
struct Product {
  void* results = nullptr;
  Rows a, b;  // of the whole call
};
struct Retake {
  Product scores, values;  // q·k and dO·v
};
void run_retake(const ScoreTile& tile, const Retake& retake, Stream stream);

// delta = rowsum(dO ∘ O) - dLSE, (batch, heads, length) contiguous of the dtype `scores`. dlse: of
// that dtype, or none.
void run_row_delta(const Rows& dout, const TensorPart& out, const TensorPart& dlse, DType scores,
                   void* delta, Stream stream);

}  // namespace flash_attn::cuda
