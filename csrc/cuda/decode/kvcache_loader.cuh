// The producers of kvcache.cuh: K and V by cp.async, row by row wherever they lie.
#pragma once

#include "../cache/loader.cuh"
#include "kvcache_schedule.cuh"
#include "kvcache_traits.cuh"

namespace flash_attn::cuda {

// Four producer warps, a quarter of each tile's rows a warp. Lane i knows where row i lies; the rows'
// addresses go round by shuffle.
template <typename Traits>
class KvcacheLoader {
  using KvTile = typename Traits::KvTile;
  static constexpr int kRows = Traits::kKeys / 4;  // a warp's, of a tile
  static constexpr int kElementBytes = Traits::k8Bit ? 1 : 2;

 public:
  static constexpr int kWarps = 4;
  // Each lane when its copies are done, and of each warp one for `valid`.
  static constexpr int kArrivals = kWarps * (32 + 1);

  __device__ __forceinline__ KvcacheLoader(const DecodeParams& params,
                                           const KvcacheTiles<Traits>& ring, int thread)
      : params_(params), ring_(ring), warp_(thread / 32), lane_(thread % 32) {}

  __device__ __forceinline__ void start(const KvcachePiece& piece) {
    sequence_ = CacheSequence(params_, piece.batch_idx);
    keys_ = piece.keys;
    place_ = find(piece.first_tile);
  }

  // Looks up the rows of a tile, whose page numbers were asked for a tile ago.
  __device__ __forceinline__ void locate(int tile) {
    const bool exists = place_.page >= 0;
    const int64_t page = exists ? place_.page : 0, row = exists ? place_.row : 0;
    k_row_ =
        bytes(params_.k_cache) + (page * params_.k_strides.batch + row * params_.k_strides.row +
                                  int64_t{blockIdx.y} * params_.k_strides.head) *
                                     kElementBytes;
    v_row_ =
        bytes(params_.v_cache) + (page * params_.v_strides.batch + row * params_.v_strides.row +
                                  int64_t{blockIdx.y} * params_.v_strides.head) *
                                     kElementBytes;
    valid_ = __ballot_sync(~0u, exists) & ~0u >> (32 - kRows);
    place_ = find(tile + 1);
  }

  __device__ __forceinline__ void keys(int stage) {
    load(stage, k_row_, params_.head_dim);
    if (lane_ == 0) {
      ring_.smem.valid[stage][warp_] = valid_;
      ptx::mbarrier_arrive(ring_.smem.full[stage]);
    }
  }
  __device__ __forceinline__ void values(int stage) {
    load(stage, v_row_, params_.head_dim_v);
    if (lane_ == 0) ptx::mbarrier_arrive(ring_.smem.full[stage]);
  }

 private:
  __device__ __forceinline__ static const char* bytes(const void* pointer) {
    return static_cast<const char*>(pointer);
  }

  // Lanes beyond kRows repeat the first ones.
  __device__ __forceinline__ CachePlace find(int tile) const {
    const int key = tile * Traits::kKeys + warp_ * kRows + lane_ % kRows;
    return key >= keys_.first && key < keys_.end ? sequence_.place(params_, key)
                                                 : CachePlace{-1, 0};
  }

  __device__ __forceinline__ void load(int stage, const char* row_of_lane, int num_cols) const {
    const int lane_row = lane_ / KvTile::kSlabChunks, lane_byte = lane_ % KvTile::kSlabChunks * 16;
    copy_rows<KvTile, kRows>(
        ring_.tiles[stage].address(warp_ * kRows + lane_row, lane_byte / 2), lane_byte,
        num_cols * kElementBytes, [&](int row) -> RowSource {
          const int from = row + lane_row;
          const auto at = __shfl_sync(~0u, reinterpret_cast<uint64_t>(row_of_lane), from);
          return {reinterpret_cast<const char*>(at) + lane_byte, (valid_ >> from & 1) != 0};
        });
    ptx::mbarrier_arrive_after_copies(ring_.smem.full[stage]);
  }

  const DecodeParams& params_;
  const KvcacheTiles<Traits>& ring_;
  int warp_, lane_;
  CacheSequence sequence_;
  SequenceKeys keys_;
  CachePlace place_;  // of the lane's row in the next tile
  const char *k_row_, *v_row_;
  uint32_t valid_;
};

}  // namespace flash_attn::cuda
