// The order in which kernels that pass over a mask's hidden tiles take theirs: those with the most
// blocks come first, so that the last ones to start are short, and thread blocks end together.
#pragma once

#include <cstdint>

#include "../core/params.h"
#include "../core/tile_mask.h"
#include "../cuda/device.h"

namespace flash_attn::sm90 {

// Rows of q, or of k, in a tile.
inline constexpr int kOrderedRows = 128;

// The tiles of each head of a mask, from the longest to the shortest. A stride is 0 in a dimension
// that the mask broadcasts.
struct MaskOrder {
  const int32_t* tiles = nullptr;  // null: there is no order
  int batch_stride = 0, head_stride = 0;
};

// The numbers that an order needs room for, in the forward and in the backward.
int64_t mask_order_size(const Masked<FwdParams>& params);
int64_t mask_order_size(const Masked<BwdParams>& params);

// Computes it in this room, and sets the tile counter to 0. Where all tiles run at once or there
// are very many, there is no order, and nothing is set.
MaskOrder order_mask_tiles(const Masked<FwdParams>& params, int32_t* room,
                           const cuda::DeviceInfo& device, Stream stream);
MaskOrder order_mask_tiles(const Masked<BwdParams>& params, int32_t* room,
                           const cuda::DeviceInfo& device, Stream stream);

}  // namespace flash_attn::sm90
