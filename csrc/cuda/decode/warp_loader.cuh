// How a warp of decode.cuh loads the keys and values of a piece.
#pragma once

#include <type_traits>

#include "../cache/loader.cuh"
#include "config.h"
#include "pieces.cuh"

namespace flash_attn::cuda {

// Loads what a warp takes of a piece, K and V in turns: load i is K(i / 2) or, if odd, V(i / 2).
template <typename Traits>
struct DenseLoader {
  using KvTile = typename Traits::KvTile;
  DenseTileLoader<KvTile, typename Traits::Stored> K, V;
  int warp;

  __device__ __forceinline__ DenseLoader(const DecodeParams& params, const DecodePiece& piece,
                                         int warp_of_block, int lane)
      : K(params.k_cache, params.k_strides, piece.cache_row, piece.kv_head, piece.first_key,
          piece.end_key, params.head_dim, lane),
        V(params.v_cache, params.v_strides, piece.cache_row, piece.kv_head, piece.first_key,
          piece.end_key, params.head_dim_v, lane),
        warp(warp_of_block) {}
  __device__ __forceinline__ void load(const KvTile& tile, int i, typename Traits::KeyBits&) const {
    (i % 2 == 0 ? K : V).load(tile, (warp + i / 2 * kDecodeWarps) * Traits::kKeys);
  }
  __device__ __forceinline__ AllKeys valid(const typename Traits::KeyBits&) const { return {}; }
};
template <typename Traits>
struct PagedLoader {
  int warp_first_key;
  CacheLoader<Traits> cache;

  __device__ __forceinline__ PagedLoader(const DecodeParams& params, const DecodePiece& piece,
                                         int warp, int lane)
      : warp_first_key(piece.first_key + warp * Traits::kKeys),
        cache(params, piece.batch_idx, piece.kv_head, max(piece.first_key, piece.first_seen),
              piece.end_key, warp_first_key, lane) {}
  __device__ __forceinline__ void load(const typename Traits::KvTile& tile, int i,
                                       typename Traits::KeyBits& valid) {
    if (i % 2 == 0) {
      cache.locate(warp_first_key + i / 2 * Traits::kBlockKeys);
      cache.keys(tile, valid);
    } else {
      cache.values(tile);
    }
  }
  __device__ __forceinline__ typename Traits::KeyBits valid(
      const typename Traits::KeyBits& bits) const {
    return bits;
  }
};
template <typename Traits>
using WarpLoader = std::conditional_t<Traits::kPaged, PagedLoader<Traits>, DenseLoader<Traits>>;

}  // namespace flash_attn::cuda
