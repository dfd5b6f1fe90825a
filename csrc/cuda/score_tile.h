// What lies between the matrix products of aten on a GPU (aten/gpu_tiles.h): each of these is one
// pass over a tile of scores, or over the rows beside it.
//
// A tile is (batch · heads_kv, group · rows, keys), contiguous: query heads that share a kv head are
// more rows of the same matrix. Scores are fp32 or fp64, operands of products those or 16 bits.
#pragma once

#include "../core/host_device.h"
#include "../core/params.h"

namespace flash_attn::cuda {

// A tensor of (batch, heads, rows, columns), by elements; 0 in a dimension that it broadcasts. data
// null: none.
struct TensorPart {
  const void* data = nullptr;
  DType dtype = DType::kFp32;
  int64_t batch = 0, head = 0, row = 0, col = 0;
};

// What turns products q·k into scores in units of log 2 (aten/score.h).
struct ScoreTile {
  int batch = 0, heads_q = 0, heads_kv = 0, rows = 0, keys = 0;  // rows: of a head
  int64_t first_query = 0, first_key = 0;
  DType scores = DType::kFp32, operands = DType::kFp32;

  double scale = 1;    // of a product: then it is S · log2 e, or with softcap S / softcap
  double softcap = 0;  // 0: none
  bool bounded = false;
  // Query i sees the keys i + offset - left .. i + offset + right.
  int64_t left = 0, right = 0, offset = 0;
  const int64_t* offsets = nullptr;     // (batch), or null: the same for all
  TensorPart query_exists, key_exists;  // bool
  TensorPart bias;                      // of the whole call
  TensorPart slopes;                    // fp32, in range
  DropoutParams dropout;

  FLASH_ATTN_HOST_DEVICE constexpr int count_rows() const { return batch * heads_q * rows; }
};

// P of a tile where it is a step of an online softmax. A hidden key's P is -0, so that
// run_restore() can tell it from one that is seen.
struct SoftmaxStep {
  const void* products = nullptr;  // q·k
  void* p = nullptr;               // dropout(P); may be the same memory
  // (rows of the tile) of the scores' dtype, read unless it is the first step.
  void *row_max = nullptr, *row_sum = nullptr;
  bool first = false;
  const void* sink = nullptr;  // (heads_q) of the scores' dtype in natural units, or null
  void* rescale = nullptr;     // (rows of the tile), written: what came before times this
  void* max_logits = nullptr;  // (rows of the tile), written, in natural units; or null
  // (rows of the tile): the largest score, or NaN where one is NaN; read unless it is the first
  // step, and null unless probabilities are wanted. Unlike row_max it knows of no sink.
  void* score_max = nullptr;
  // What run_probabilities() writes, of a row's only step; or none.
  TensorPart probabilities;
};
void run_softmax_step(const ScoreTile& tile, const SoftmaxStep& step, Stream stream);

// The gradient of a tile's scores: dS = P ∘ (dropout(dP) - delta), with softcap's derivative.
struct GradientStep {
  const void* products = nullptr;        // q·k
  const void* value_products = nullptr;  // dO·v = dP
  TensorPart lse, delta;                 // of the call's rows; natural units
  void* p = nullptr;                     // dropout(P), -0 where hidden
  void* ds = nullptr;                    // may be value_products
  void* dbias = nullptr;                 // dS before softcap, of the scores' dtype; or null
};
void run_gradient_step(const ScoreTile& tile, const GradientStep& step, Stream stream);

// P alone, divided by its row's largest, as a part of a tensor of operands: negative where dropout
// drops it, and 0 where hidden. score_max: SoftmaxStep's, of all keys.
void run_probabilities(const ScoreTile& tile, const void* products, const void* score_max,
                       const TensorPart& probabilities, Stream stream);

// O = o / l and LSE = m + log l of a tile's rows. o: (rows of the tile, head_dim_v), not normalised.
struct RowResults {
  const void *o = nullptr, *row_max = nullptr, *row_sum = nullptr;
  int head_dim_v = 0;
  TensorPart out, lse;  // written, from first_query on
};
void run_finish_rows(const ScoreTile& tile, const RowResults& results, Stream stream);

inline constexpr int kScoreTileKeys = 4096;  // the most of a tile of run_softmax_step

}  // namespace flash_attn::cuda
