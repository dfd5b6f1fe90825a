// What TMA knows of the tensors of a forward.
#pragma once

#include "fwd_pages.cuh"
#include "fwd_traits.cuh"
#include "tile/tensor_map.h"

namespace flash_attn::sm90 {

// Of pages, where a window hides keys in front of those that count.
struct PageFrontMaps {
  CUtensorMap k, v;
};

template <int kBiasMaps>
struct FwdTensorMaps {
  CUtensorMap q, k, v, out, bias[kBiasMaps];
  PageBoxes pages;
  PageFrontMaps front;
};
template <>
struct FwdTensorMaps<0> {
  CUtensorMap q, k, v, out;
  PageBoxes pages;
  PageFrontMaps front;
};

template <typename Traits>
FwdTensorMaps<Traits::kBiasMaps> make_fwd_tensor_maps(const typename Traits::Params& params) {
  const bool varlen_q = params.cu_seqlens_q != nullptr, varlen_k = params.cu_seqlens_k != nullptr;
  const TensorShape q_shape = {.dtype = Traits::kDType,
                               .cols = params.head_dim,
                               .rows = varlen_q ? params.total_q : params.seqlen_q,
                               .heads = params.heads_q,
                               .batch = varlen_q ? 1 : params.batch};
  const TensorShape k_shape = {.dtype = Traits::kDType,
                               .cols = params.head_dim,
                               .rows = varlen_k ? params.total_k : params.seqlen_k,
                               .heads = params.heads_kv,
                               .batch = varlen_k                            ? 1
                                        : params.cache_batch_idx == nullptr ? params.batch
                                                                            : params.cache_rows};
  TensorShape v_shape = k_shape, out_shape = q_shape;
  v_shape.cols = out_shape.cols = params.head_dim_v;
  const PackedHeads packed = packed_heads<Traits>(params);
  const auto pages = PageBoxes::make(params.pages, Traits::kBlockN, params.window_left);
  const auto make_key_map = [&](const void* keys, const Strides& strides, const TensorShape& shape,
                                int slab_cols) {
    if (pages.rows > 0) {
      return make_page_map(keys, strides, shape, params.pages, slab_cols, pages.rows);
    }
    return make_tensor_map(keys, strides, shape, slab_cols, Traits::kBlockN);
  };
  FwdTensorMaps<Traits::kBiasMaps> maps = {
      .q = make_tensor_map(params.q, params.q_strides, q_shape, Traits::QTile::kSlabCols,
                           Traits::kBlockM / packed.heads(), HiddenRows::kBehind, packed.heads()),
      .k = make_key_map(params.k, params.k_strides, k_shape, Traits::KTile::kSlabCols),
      .v = make_key_map(params.v, params.v_strides, v_shape, Traits::VTile::kSlabCols),
      .out = make_tensor_map(params.out, params.out_strides, out_shape,
                             Traits::OutputSlab::kSlabCols, 16),
      .pages = pages};
  if (pages.rows > 0 && params.window_left >= 0) {
    const auto make_front_map = [&](const void* keys, const Strides& strides,
                                    const TensorShape& shape, int slab_cols) {
      return make_page_map(keys, strides, shape, params.pages, slab_cols, pages.rows,
                           HiddenRows::kInFront);
    };
    maps.front = {make_front_map(params.k, params.k_strides, k_shape, Traits::KTile::kSlabCols),
                  make_front_map(params.v, params.v_strides, v_shape, Traits::VTile::kSlabCols)};
  }
  if constexpr (Traits::kStagedBias) {
    using Tile = typename Traits::BiasTile;
    using RestTile = typename Traits::BiasRestTile;
    maps.bias[0] = make_bias_map(params, Tile::kSlabCols, Tile::kRows);
    if constexpr (Traits::kBiasMaps > 1) {
      maps.bias[1] = make_bias_map(params, RestTile::kSlabCols, RestTile::kRows);
    }
  }
  return maps;
}

}  // namespace flash_attn::sm90
