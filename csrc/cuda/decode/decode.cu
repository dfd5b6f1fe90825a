#include "decode.h"

#include <algorithm>

#include "../dispatch.h"
#include "combine.cuh"
#include "config.h"

namespace flash_attn::cuda {

namespace {

// Estimated time of a call, in units of the time that the whole device needs to read one tile of
// keys for each SM. The constants are from sweeps over 1 to 256 pieces of 12 shapes on an H200; the
// pieces they choose were within 2 % of the best of each sweep.
struct DecodeCost {
  int64_t row_tiles;
  int tiles;  // of keys that one row tile sees, kDecodeWarps warps wide
  int num_sms, blocks_per_sm;
  // Of the SMs, with one block each: fewer do not read faster each. Half of them saturate the memory,
  // all of them where page numbers are looked up.
  double least_share;

  double of(int splits) const {
    constexpr double kBlockOverhead = 0.25;  // start and end of a block
    constexpr double kCombine = 0.8, kCombinePerSplit = 0.01;
    const int64_t blocks = row_tiles * splits, slots = int64_t{num_sms} * blocks_per_sm;
    const double block = (tiles + splits - 1) / splits + kBlockOverhead;
    const double full_waves = block * blocks_per_sm * static_cast<double>(blocks / slots);
    const double share = static_cast<double>(blocks % slots) / num_sms;
    const double last_wave = share == 0 ? 0 : block * std::max(least_share, share);
    return full_waves + last_wave + (splits > 1 ? kCombine + kCombinePerSplit * splits : 0);
  }
};

constexpr int kTwoBlocksBytes = (2 * 97 - 1) * 1024;  // 1 KiB a block is the system's
int blocks_per_sm(const DeviceInfo& device) {
  return device.smem_optin_bytes >= kTwoBlocksBytes ? 2 : 1;
}

// The lengths are on the device; the host knows what bounds them. Windows count from the end.
int64_t most_keys(const DecodeParams& params) {
  return params.window_left < 0
             ? params.capacity
             : std::min<int64_t>(params.capacity, int64_t{params.window_left} + params.seqlen_q);
}

// Whether there may be several pieces of a sequence: with most_pieces, shorter ones than asked for.
bool is_cut(const DecodeParams& params) {
  return params.splits.count > 1 || params.splits.most_pieces > 0;
}

// Into how many equal pieces.
int best_num_splits(const DecodeParams& params, const DeviceInfo& device) {
  constexpr int kMaxSplits = 256, kAlwaysTried = 4;
  const int tile_keys = with_head_dim_class(
      params.head_dim, [&]<int kHeadDim> { return kDecodeTile<kHeadDim>.keys * kDecodeWarps; });
  const DecodeCost cost{
      .row_tiles = decode_row_tiles(params),
      .tiles = static_cast<int>((most_keys(params) + tile_keys - 1) / tile_keys),
      .num_sms = device.num_sms,
      .blocks_per_sm = blocks_per_sm(device),
      .least_share = params.block_table == nullptr ? 0.49 : 0.97,
  };
  int best = 1;
  double best_cost = cost.of(1);
  const int64_t one_wave = int64_t{cost.num_sms} * cost.blocks_per_sm / cost.row_tiles;
  const int64_t most =
      std::min<int64_t>({cost.tiles, kMaxSplits, std::max<int64_t>(one_wave, kAlwaysTried)});
  for (int splits = 2; splits <= most; ++splits) {
    const double splits_cost = cost.of(splits);
    if (splits_cost < best_cost) {
      best = splits;
      best_cost = splits_cost;
    }
  }
  return best;
}

// Equal pieces have the least to merge, but one long sequence holds up all. Pages are the mark of
// lengths that differ, and long calls are where it tells.
bool cuts_by_length(const DecodeParams& params, int64_t places) {
  constexpr int64_t kLongBytes = int64_t{256} << 20;
  constexpr int kShortKeys = 2048;
  const int64_t keys = most_keys(params);
  // Whole sequences, enough of them, that blocks which come and go even out.
  const bool even = keys <= kShortKeys && decode_row_tiles(params) >= 2 * places;
  return params.block_table != nullptr && params.batch > 1 && !even &&
         4 * params.batch * keys * params.heads_kv * params.head_dim > kLongBytes;
}

}  // namespace

Splits decode_splits(const DecodeParams& params, int num_splits, bool batch_invariant,
                     const DeviceInfo& device) {
  // 4096 rather than 2048: half the merges, and 1 to 2 % faster on 64 ragged sequences.
  constexpr int kPieceKeys = 4096, kMostWaves = 8;
  if (num_splits > 0) return Splits::alike(num_splits);
  const int64_t places = int64_t{device.num_sms} * blocks_per_sm(device);
  if (!batch_invariant && !cuts_by_length(params, places)) {
    return Splits::alike(best_num_splits(params, device));
  }
  const int keys = batch_invariant ? kInvariantKeys : kPieceKeys;
  const int64_t blocks_per_piece = decode_row_tiles(params) / params.batch;
  const int least_pieces = static_cast<int>(std::max<int64_t>(places / blocks_per_piece, 1));
  return Splits::by_length(keys, (params.capacity - 1) / keys + 1, least_pieces,
                           batch_invariant ? 0 : kMostWaves * least_pieces);
}

int64_t decode_workspace_rows(const DecodeParams& params) {
  return is_cut(params) ? RowsByToken::rows(params, decode_pieces(params)) : 0;
}

void run_decode(const DecodeParams& params, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> {
    with_head_dim_class(params.head_dim,
                        [&]<int kHeadDim> { launch_decode<kDType, kHeadDim>(params, stream); });
  });
  if (is_cut(params)) run_decode_combine(params, stream);
}

void run_decode_combine(const DecodeParams& params, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> { launch_decode_combine<kDType>(params, stream); });
}

}  // namespace flash_attn::cuda
