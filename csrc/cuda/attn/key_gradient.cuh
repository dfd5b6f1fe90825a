// Where dK and dV of one block of keys are written.
#pragma once

#include "../tile/fragment.cuh"
#include "../tile/smem_tile.cuh"
#include "seqlen.cuh"

namespace flash_attn {

// The rows of dk and dv that belong to the keys from first_key on. Keys of the segment that do not
// count (behind len_k, and the leftpad before them) get 0: row r from k_begin on wraps around at
// the segment's end to its beginning.
class KeyGradientRows {
 public:
  __device__ __forceinline__ KeyGradientRows(const SeqlenInfo& seqlen, int batch_idx, int head_kv,
                                             int first_key)
      : seqlen_(seqlen), batch_idx_(batch_idx), head_kv_(head_kv), first_key_(first_key) {}

  // Copies kRows rows of the tile, from tile_row on, which is first_key + tile_row's, and num_cols
  // columns. Thread `thread` of kThreads calls it.
  template <int kRows, int kThreads, typename Tile>
  __device__ __forceinline__ void store(void* gradient, const Strides& strides, int num_cols,
                                        const Tile& tile, int tile_row, int thread) const {
    using Element = typename Tile::Element;
    constexpr int kChunk = Tile::kChunk, kRowChunks = Tile::kCols / kChunk;
    Element* matrix = static_cast<Element*>(gradient) +
                      SeqlenInfo::offset(strides, batch_idx_, head_kv_, seqlen_.segment_k_begin);
    for (int i = thread; i < kRows * kRowChunks; i += kThreads) {
      const int row = tile_row + i / kRowChunks, col = i % kRowChunks * kChunk;
      const int key = first_key_ + row;
      if (key >= seqlen_.segment_k || col >= num_cols) continue;
      uint4 chunk = {};
      if (key < seqlen_.len_k) {
        chunk = *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(tile.data) +
                                                Tile::byte_offset(row, col));
      }
      // What is read again meanwhile keeps the L2 cache.
      __stcs(reinterpret_cast<uint4*>(matrix + segment_row(key) * strides.row + col), chunk);
    }
  }

  // Stores kCols columns of fp32 from registers, which lie at first_col of a warp's 16 rows.
  // num_cols of them exist. tile_row is that of the warp's first row.
  template <int kCols, int kN>
  __device__ __forceinline__ void store_wide(float* gradient, const Strides& strides, int num_cols,
                                             const Accumulator<1, kN>& rows, int first_col,
                                             int tile_row, int lane) const {
    float* const matrix =
        gradient + SeqlenInfo::offset(strides, batch_idx_, head_kv_, seqlen_.segment_k_begin);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int key = first_key_ + tile_row + fragment_row(row, lane);
      if (key >= seqlen_.segment_k) continue;
      float* const to = matrix + segment_row(key) * strides.row + fragment_col(0, lane);
#pragma unroll
      for (int col = 0; col < kCols && first_col + col < kN; col += 8) {
        if (col >= num_cols) break;
        const float* const c = rows.data[0][(first_col + col) / 8] + 2 * row;
        const bool counts = key < seqlen_.len_k;
        *reinterpret_cast<float2*>(to + col) = {counts ? c[0] : 0.f, counts ? c[1] : 0.f};
      }
    }
  }

 private:
  // The row of the segment where a key's gradient goes.
  __device__ __forceinline__ int64_t segment_row(int key) const {
    const int64_t leftpad = seqlen_.k_begin - seqlen_.segment_k_begin, unwrapped = leftpad + key;
    return unwrapped < seqlen_.segment_k ? unwrapped : unwrapped - seqlen_.segment_k;
  }

  const SeqlenInfo& seqlen_;
  int batch_idx_, head_kv_, first_key_;
};

}  // namespace flash_attn
