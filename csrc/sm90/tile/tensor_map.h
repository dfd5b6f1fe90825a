// Tensor maps: what TMA knows of a tensor in global memory. Host side.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "../../core/failure.h"
#include "../../core/params.h"

namespace flash_attn::sm90 {

// A box of TMA that stops at the end of its sequence. A plain map knows only the end of the tensor:
// behind the last row of a varlen sequence (or of seqused) it would read the neighbour's rows or
// unused ones, whose NaN survive a product with P = 0, and would write over them. So a map has the
// rows twice, with the same stride, and starts `rows` rows before the tensor:
//
//   address(first, last) = tensor + (first + last - rows) · row stride       0 <= first < rows
//
// Row r of a sequence [begin, begin + len) is first = rows - len + r, last = begin + len: r >= len
// lies beyond the map. Reads give zeros there, writes do nothing, and nothing before `begin` is
// addressed, but for a box that lies beyond the map as a whole: TMA may then touch the map's first
// byte, which nobody may own. Such boxes are never asked for.
//
// Rows in front are hidden by a negative `first`: with last = h + n, row r of those that begin with
// row n of the tensor is first = r - h, and r < h lies before the map. A box that begins outside its
// map makes TMA touch the map's first byte, too, so such a map begins with the tensor itself.
struct SequenceBox {
  int first;  // of row 0
  int last;

  SequenceBox() = default;
#ifdef __CUDACC__
  __device__ __forceinline__ SequenceBox(int64_t rows, int64_t begin, int len)
      : first(static_cast<int>(rows - len)), last(static_cast<int>(begin + len)) {}
#endif
};

struct TensorShape {
  DType dtype;
  int cols;
  int64_t rows;  // of one batch entry
  int heads, batch;
};

// On which side of a box a map can hide rows.
enum class HiddenRows { kBehind, kInFront };

// Coordinates: (column, SequenceBox::first + row, SequenceBox::last, head, batch). A box has
// box_rows rows of box_cols columns, 64 or 32, swizzled as SmemTile wants it, and may have as many
// rows of the heads behind it. Columns beyond `cols` are as rows beyond a sequence.
inline CUtensorMap make_tensor_map(const void* tensor, const Strides& strides,
                                   const TensorShape& shape, int box_cols, int box_rows,
                                   HiddenRows hidden = HiddenRows::kBehind, int box_heads = 1) {
  static const auto encode = [] {
    void* function = nullptr;  // through the runtime, so that nothing links the driver's library
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      fail({"flash_attn: the CUDA driver has no cuTensorMapEncodeTiled"});
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (shape.rows == 0) return {};  // nothing to address
  constexpr int kRank = 5;
  constexpr int64_t kElementBytes = 2, kAnyStride = 16;
  if (shape.rows >= INT32_MAX / 2) {
    fail({"flash_attn: rows of a tensor: expected fewer than 2^30, got ", shape.rows});
  }
  const auto stride = [](int64_t elements, int64_t size) {
    return static_cast<cuuint64_t>(size == 1 ? kAnyStride : elements * kElementBytes);
  };
  const auto rows = static_cast<cuuint64_t>(shape.rows);
  const cuuint64_t sizes[kRank] = {static_cast<cuuint64_t>(shape.cols), rows, rows + 1,
                                   static_cast<cuuint64_t>(shape.heads),
                                   static_cast<cuuint64_t>(shape.batch)};
  const cuuint64_t row_stride = stride(strides.row, shape.rows);
  const cuuint64_t byte_strides[kRank - 1] = {row_stride, row_stride,
                                              stride(strides.head, shape.heads),
                                              stride(strides.batch, shape.batch)};
  const cuuint32_t box[kRank] = {static_cast<cuuint32_t>(box_cols),
                                 static_cast<cuuint32_t>(box_rows), 1,
                                 static_cast<cuuint32_t>(box_heads), 1};
  const cuuint32_t steps[kRank] = {1, 1, 1, 1, 1};
  char* base = static_cast<char*>(const_cast<void*>(tensor));
  if (hidden == HiddenRows::kBehind) base -= rows * row_stride;
  CUtensorMap map;
  const CUresult result =
      encode(&map,
             shape.dtype == DType::kFp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             kRank, base, sizes, byte_strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_cols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail({"flash_attn: cuTensorMapEncodeTiled failed with error ", static_cast<int>(result)});
  }
  return map;
}

// Whether TMA can read a bias: of q's dtype, keys side by side, the other strides multiples of 16
// bytes (0 for one that broadcasts the queries), dense, and as many queries and keys as the tensors
// have.
template <typename Params>
bool can_stage_bias(const Params& params) {
  const BiasParams& bias = params.score.bias;
  const auto aligned = [](int64_t stride) { return stride % 8 == 0; };
  return bias.dtype == params.dtype && bias.key_stride == 1 && bias.row_stride >= 0 &&
         aligned(bias.row_stride) && aligned(bias.head_stride) && aligned(bias.batch_stride) &&
         reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 && params.cu_seqlens_q == nullptr &&
         params.cu_seqlens_k == nullptr && bias.rows >= params.seqlen_q &&
         bias.keys >= params.seqlen_k;
}

// Whether TMA can also write the gradient of such a bias, block by block: it broadcasts nothing.
inline bool can_stage_bias_gradient(const BwdParams& params) {
  return params.dbias.form == BiasGradientParams::Form::kWhole && can_stage_bias(params) &&
         params.dbias.dtype == params.dtype && params.dbias.keys % 8 == 0;
}

inline CUtensorMap make_bias_gradient_map(const BwdParams& params, int box_cols, int box_rows) {
  const BiasGradientParams& gradient = params.dbias;
  return make_tensor_map(
      gradient.data,
      {.batch = gradient.batch_stride, .row = gradient.keys, .head = gradient.head_stride},
      {.dtype = gradient.dtype,
       .cols = gradient.keys,
       .rows = gradient.rows,
       .heads = params.heads_q,
       .batch = params.batch},
      box_cols, box_rows);
}

// Queries as rows. A dimension that the bias broadcasts has the size 1.
template <typename Params>
CUtensorMap make_bias_map(const Params& params, int box_cols, int box_rows) {
  const BiasParams& bias = params.score.bias;
  return make_tensor_map(
      bias.data, {.batch = bias.batch_stride, .row = bias.row_stride, .head = bias.head_stride},
      {.dtype = bias.dtype,
       .cols = bias.keys,
       .rows = bias.rows,
       .heads = bias.head_stride == 0 ? 1 : params.heads_q,
       .batch = bias.batch_stride == 0 ? 1 : params.batch},
      box_cols, box_rows);
}

}  // namespace flash_attn::sm90
