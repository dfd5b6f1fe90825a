// A piece's rows of Q on their way to the matrix product of decode.cuh.
#pragma once

#include "../cache/rotary.cuh"
#include "../tile/fragment.cuh"
#include "../tile/smem_operand.cuh"
#include "pieces.cuh"

namespace flash_attn::cuda {

// Returns the piece's rows of Q as a left operand, which takes the columns of each 16 in another
// order beside a cache of 8 bits (widened_gemm.cuh). Rows and columns beyond are 0.
template <typename Traits>
__device__ __forceinline__ OperandA<1, Traits::kHeadDim> load_queries(const DecodeParams& params,
                                                                      const DecodePiece& piece,
                                                                      int lane) {
  using Element = typename Traits::Element;
  OperandA<1, Traits::kHeadDim> Q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(half, lane), token = piece.token(row);
    const Strides& strides = params.q_strides;
    const Element* source = static_cast<const Element*>(params.q) +
                            piece.batch_idx * strides.batch + token * strides.row +
                            piece.head(row, token) * strides.head +
                            lane % 4 * (Traits::k8Bit ? 4 : 2);
#pragma unroll
    for (int col = 0; col < Traits::kHeadDim; col += 8) {
      // Of 8 bits: the second of two neighbouring pairs of columns, instead of the pair 8 columns
      // on. (Loaded as one number, the two would wait for each other on their way to their
      // registers.)
      const int offset = Traits::k8Bit ? col / 16 * 16 + col % 16 / 4 : col;
      const bool valid = row < piece.num_rows && col < params.head_dim;
      Q.data[0][col / 16][col % 16 / 8 * 2 + half] =
          valid ? *reinterpret_cast<const uint32_t*>(source + offset) : 0;
    }
  }
  return Q;
}

// The same rows, rotated. A thread turns eight neighbouring columns, so the block does it together,
// on the way through the last stage of each ring, which is free before and after.
template <typename Traits>
__device__ __forceinline__ OperandA<1, Traits::kHeadDim> load_rotated_queries(
    typename Traits::KvTile (&ring)[kDecodeWarps][Traits::kStages], const DecodeParams& params,
    const DecodePiece& piece) {
  using Element = typename Traits::Element;
  using KvTile = typename Traits::KvTile;
  static_assert(KvTile::kRows >= kDecodeRows);
  constexpr int kChunks = Traits::kHeadDim / kChunk, kStage = Traits::kStages - 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = threadIdx.x; i < kDecodeRows * kChunks; i += Traits::kThreads) {
    const int row = i / kChunks, col = i % kChunks * kChunk;
    float x[kChunk] = {};
    if (row < piece.num_rows && col < params.head_dim) {
      const int token = piece.token(row);
      const auto* source =
          query_row<Element>(params, piece.batch_idx, token, piece.head(row, token));
      load_query_chunk(x, source, col, params, piece.batch_idx, token);
    }
#pragma unroll
    for (int copy = 0; copy < kDecodeWarps; ++copy) {
      store_chunk<Element>(ring[copy][kStage].pointer(row, col), x);
    }
  }
  __syncthreads();
  const SmemOperand<Side::kA, Layout::kKInner, KvTile> view(ring[warp][kStage], 0, lane);
  OperandA<1, Traits::kHeadDim> Q;
#pragma unroll
  for (int k = 0; k < Traits::kHeadDim; k += 16) view.load(Q.data[0][k / 16], 0, k);
  __syncwarp();
  return Q;
}

}  // namespace flash_attn::cuda
