// Tiles of K on their way into the shared memory of latent.cuh. TMA brings each in boxes of keys
// that lie side by side: in one box from a dense cache, else in so many that each lies in one page.
#pragma once

#include <numeric>

#include "../cuda/cache/rows.cuh"
#include "latent_traits.cuh"
#include "ptx/fence.cuh"
#include "tile/copy.cuh"

namespace flash_attn::sm90 {

// How TMA finds the keys.
struct LatentCache {
  CUtensorMap map;
  int box_keys;  // a power of two, and a multiple of 8, after which a tile's swizzle begins anew

  template <typename Traits>
  static LatentCache of(const DecodeParams& params) {
    if (params.cache_rows == 0) return {.map = {}, .box_keys = kLatentKeys};  // nothing to address
    const bool paged = params.block_table != nullptr;
    const int box_keys = paged ? std::gcd(params.page_size, kLatentKeys) : kLatentKeys;
    const TensorShape shape = {.dtype = Traits::kDType,
                               .cols = params.head_dim,
                               .rows = params.page_size,
                               .heads = params.heads_kv,
                               .batch = params.cache_rows};
    constexpr int kCols = Traits::PartTile::kSlabCols;
    return {.map = make_tensor_map(params.k_cache, params.k_strides, shape, kCols, box_keys),
            .box_keys = box_keys};
  }
};

// The boxes of a piece's tiles, tile after tile. A warp has them, lane i box i.
class LatentBoxes {
 public:
  __device__ __forceinline__ LatentBoxes(const DecodeParams& params, int box_keys,
                                         const cuda::KvcachePiece& piece, int lane)
      : params_(params),
        box_keys_(box_keys),
        lane_(lane),
        keys_(piece.keys),
        sequence_(params, piece.batch_idx) {
    look_up(piece.first_tile);
  }

  // Finds the boxes of a tile, whose page numbers were asked for before. It asks for those of the
  // next one. Returns which of the tile's keys exist, one bit each.
  __device__ __forceinline__ uint64_t locate(int tile) {
    place_ = cuda::CacheSequence::place(params_, first_key(tile), page_);
    boxes_ = __ballot_sync(~0u, place_.page >= 0);
    look_up(tile + 1);
    return uint64_t{existing(tile, 32)} << 32 | existing(tile, 0);
  }
  // Keys of the boxes that hold some.
  __device__ __forceinline__ int num_keys() const { return __popc(boxes_) * box_keys_; }

  // Starts the copies of the tile's columns, which are those of K from first_col on.
  template <typename Tile>
  __device__ __forceinline__ void load(Tile& tile, const CUtensorMap& map, int first_col,
                                       uint64_t& mbarrier, ptx::CacheHint hint) const {
    if (place_.page < 0) return;
    // Of a map that hides no rows, SequenceBox::last is their number.
    const int row = lane_ * box_keys_, last = params_.page_size, kv_head = blockIdx.y;
#pragma unroll
    for (int col = 0; col < Tile::kCols; col += Tile::kSlabCols) {
      if (first_col + col >= params_.head_dim) break;
      ptx::tma_load(&tile.data[col * Tile::kRows + row * Tile::kSlabCols], map,
                    {first_col + col, place_.row, last, kv_head, place_.page}, mbarrier, hint);
    }
  }

 private:
  __device__ __forceinline__ int first_key(int tile) const {
    return tile * kLatentKeys + lane_ * box_keys_;
  }
  // A box without keys of the piece is not asked for: there may be no page for it.
  __device__ __forceinline__ void look_up(int tile) {
    const int first = first_key(tile);
    const bool holds_keys =
        lane_ * box_keys_ < kLatentKeys && first < keys_.end && first + box_keys_ > keys_.first;
    page_ = holds_keys ? sequence_.page_number(params_, first) : -1;
  }
  __device__ __forceinline__ uint32_t existing(int tile, int first_row) const {
    const int row = first_row + lane_, key = tile * kLatentKeys + row;
    const bool in_box = (boxes_ >> row / static_cast<unsigned>(box_keys_) & 1) != 0;
    return __ballot_sync(~0u, in_box && key >= keys_.first && key < keys_.end);
  }

  const DecodeParams& params_;
  int box_keys_, lane_;
  cuda::SequenceKeys keys_;
  cuda::CacheSequence sequence_;
  int page_;  // of the lane's box in the next tile
  cuda::CachePlace place_;
  uint32_t boxes_;  // those that exist
};

// How many slabs of a tile's columns hold columns of K.
template <typename Tile>
__device__ __forceinline__ int num_slabs(const DecodeParams& params, int first_col) {
  constexpr int kCols = Tile::kSlabCols, kSlabs = Tile::kCols / kCols;
  return min(max((params.head_dim - first_col + kCols - 1) / kCols, 0), kSlabs);
}

// The two producer warps run it. The one with `own` brings the parts of each tile that its consumer
// multiplies first, and gives back first. The other one brings the other parts.
template <typename Traits>
__device__ __forceinline__ void load_latent_loop(const DecodeParams& params,
                                                 const LatentCache& cache,
                                                 LatentStorage<Traits>& smem,
                                                 typename Traits::Schedule& schedule, bool own) {
  using PartTile = typename Traits::PartTile;
  using RestTile = typename Traits::RestTile;
  auto& barriers = own ? smem.own_parts : smem.other_parts;
  const int lane = threadIdx.x % 32;
  const auto hint = gridDim.x == 1 ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kEvictNormal;
  Ring<Traits::kStages> ring(barriers[0]);
  cuda::KvcachePiece piece;
  while (schedule.next(piece)) {
    LatentBoxes boxes(params, cache.box_keys, piece, lane);
    for (int tile = piece.first_tile; tile < piece.end_tile; ++tile) {
      const uint64_t exists = boxes.locate(tile);
      const int consumer = own ? ring.stage() : 1 - ring.stage();
      auto& K = smem.k[ring.stage()];
#pragma unroll
      for (int i = 0; i < Traits::kParts; ++i) {
        const Ring<Traits::kStages> of_part = ring.in(barriers[i]);
        const int part = consumer * Traits::kParts + i, first_col = part * Traits::kPartCols;
        const bool with_rest = own && i == Traits::kParts - 1;
        of_part.wait_empty();
        if (lane == 0) {
          if (own && i == 0) smem.exists[ring.stage()] = exists;
          const int slabs = num_slabs<PartTile>(params, first_col) +
                            (with_rest ? num_slabs<RestTile>(params, kLatentHeadDimV) : 0);
          constexpr int kSlabBytes = PartTile::kSlabBytes / PartTile::kRows;  // of a key
          of_part.expect_bytes(boxes.num_keys() * slabs * kSlabBytes);
        }
        __syncwarp();
        boxes.load(K.part[part], cache.map, first_col, of_part.full(), hint);
        if (with_rest) boxes.load(K.rest, cache.map, kLatentHeadDimV, of_part.full(), hint);
      }
      ring.advance();
    }
  }
}

// Columns of K beyond head_dim are in no box. All threads make them 0, before anything is loaded.
template <typename Traits>
__device__ __forceinline__ void clear_absent_columns(const DecodeParams& params,
                                                     LatentStorage<Traits>& smem) {
  const auto zero = [&](auto& tile, int first_col) {
    zero_absent_slabs(tile, params.head_dim - first_col, threadIdx.x, Traits::kThreads);
  };
  for (auto& K : smem.k) {
    for (int i = 0; i < Traits::kConsumers * Traits::kParts; ++i) {
      zero(K.part[i], i * Traits::kPartCols);
    }
    zero(K.rest, kLatentHeadDimV);
  }
  ptx::fence_async_shared();
}

}  // namespace flash_attn::sm90
