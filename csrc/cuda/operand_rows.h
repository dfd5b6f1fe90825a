// Rows of tensors as operands of aten's products on a GPU (aten/gpu_tiles.h).
#pragma once

#include "score_tile.h"

namespace flash_attn::cuda {

// Rows of a tensor as an operand whose product a hidden key takes no part in: 0 · NaN is NaN, so
// what is not finite becomes 0, and is added again where it is seen, by run_restore().
struct Rows {
  TensorPart x;
  int batch = 0, heads = 0, length = 0, cols = 0;
};
// finite: like x, contiguous. bad: (batch, heads, length), whether a row has any such number.
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
  const uint8_t* bad = nullptr;
  bool of_keys = false;
};
void run_restore(const ScoreTile& tile, const Restore& restore, Stream stream);

// delta = rowsum(dO ∘ O) - dLSE, (batch, heads, length) contiguous of the dtype `scores`. dlse: of
// that dtype, or none.
void run_row_delta(const Rows& dout, const TensorPart& out, const TensorPart& dlse, DType scores,
                   void* delta, Stream stream);

}  // namespace flash_attn::cuda
