// The forward kernel, and its instances for both dtypes by head-dim class: plain in inst/fwd_d*.cu,
// with score terms in fwd_scores_d*.cu, with one of them in fwd_one_term_d*.cu or, a bias, in
// fwd_bias_d*.cu, with the keys in pieces in fwd_pieces_d*.cu, without terms but with max_logits in
// fwd_max_logits_d*.cu, with a mask whose hidden tiles are passed over in fwd_masked_d*.cu.
#pragma once

#include "../core/host_device.h"
#include "../core/params.h"
#include "../core/tile_mask.h"
#include "../cuda/device.h"
#include "../cuda/few_queries.h"
#include "mask_order.h"

namespace flash_attn::sm90 {

// Compute capability 9.0 only. Any head_dim and head_dim_v up to 256 that are multiples of 8, fp16
// and bf16; score terms.
void run_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);

// The tiles of each head of a varlen call, or of heads that share tiles, on the device; no other row
// is written. Two launches may share them. The first has thread blocks on first_sms
// multiprocessors, each of which begins with the tile of its number; all others come from the
// tile_counter, which is 0 before.
struct FwdTileList {
  const cuda::ListedTile* tiles = nullptr;  // null: all tiles
  const int32_t* num_tiles = nullptr;       // of a head
  int first_sms = 0;
  bool is_second = false;    // of the launches
  bool runs_beside = false;  // another kernel, whose room early thread blocks would take

  FLASH_ATTN_HOST_DEVICE bool exists() const { return tiles != nullptr; }
};
// How the rows of a tile are dealt out to query heads that read one kv head: each has 2^token_bits
// of them. By default a tile has one head. Where heads share tiles that no list has, each sequence
// has as many as seqlen_q asks for, and the last of them may be several, one after the other:
// lengths are on the device, and a sequence may be longer than the caller says.
struct PackedHeads {
  static constexpr int kTileRows = 128;
  int token_bits = 7;

  FLASH_ATTN_HOST_DEVICE bool share() const { return heads() > 1; }
  FLASH_ATTN_HOST_DEVICE int tokens() const { return 1 << token_bits; }
  FLASH_ATTN_HOST_DEVICE int heads() const { return kTileRows >> token_bits; }
  // Of a row of a tile.
  FLASH_ATTN_HOST_DEVICE int token(int row) const { return row & (tokens() - 1); }
  FLASH_ATTN_HOST_DEVICE int head(int row) const { return row >> token_bits; }
  // How many tiles the heads that read one kv head take, of the same tokens.
  FLASH_ATTN_HOST_DEVICE int tiles(int group) const { return (group + heads() - 1) / heads(); }
  // How many tiles a head takes.
  FLASH_ATTN_HOST_DEVICE int blocks(int seqlen) const {
    return (seqlen + tokens() - 1) >> token_bits;
  }
};
// run_fwd() in pieces, out and lse not written (FwdParams::num_splits), or in one piece, with both
// written. With a list seqlen_q is at least the longest sequence's. Keys of missing pages are hidden
// here, while run_fwd() reads others in their place.
struct FwdInPieces : FwdParams {
  FwdTileList list = {};
  PackedHeads packed = {};
};
void run_fwd_in_pieces(const FwdInPieces& params, const cuda::DeviceInfo& device, Stream stream);
// The same with a mask whose hidden tiles are passed over. Dense, no score terms. order: room for
// mask_order_size() numbers.
void run_fwd_masked(const Masked<FwdParams>& params, int32_t* order, const cuda::DeviceInfo& device,
                    Stream stream);

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_fwd_with_scores(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// Head dims up to 128. Softcap, ALiBi or dropout, and no other term.
template <DType kDType, int kHeadDim>
void launch_fwd_with_one_term(const FwdParams& params, const cuda::DeviceInfo& device,
                              Stream stream);
// The same of a bias for which can_stage_bias() or broadcasts_queries().
template <DType kDType, int kHeadDim>
void launch_fwd_with_bias(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// params.max_logits, no score term.
template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd_with_max_logits(const FwdParams& params, const cuda::DeviceInfo& device,
                                Stream stream);
// head_dim_v = head_dim.
template <DType kDType, int kHeadDim>
void launch_fwd_in_pieces(const FwdInPieces& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_fwd_masked(const Masked<FwdParams>& params, const MaskOrder& order,
                       const cuda::DeviceInfo& device, Stream stream);

}  // namespace flash_attn::sm90
