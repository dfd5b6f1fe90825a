#include "plan.h"

#include <algorithm>
#include <cmath>

#include "../capability.h"
#include "../dispatch.h"
#include "config.h"
#include "kvcache_config.h"
#include "prefix.h"
#include "workspace.h"

namespace flash_attn::cuda {
namespace {

// Keys of a piece where a result may not depend on the batch.
constexpr int kInvariantKeys = 2048;

int64_t widest(const CallShape& call) { return std::max(call.head_dim, call.head_dim_v); }

// Tiles of the rows that read one kv head of one sequence.
int64_t row_tiles(const CallShape& call) {
  return ceil_div(call.tokens * call.heads_q / call.heads_kv, kDecodeRows);
}

// How long blocks take for their tiles, by the share of the SMs that has one: 2 where each has two.
struct Reading {
  // The share below which a block does not read faster, as it waits for its own reads.
  double least_share;
  int64_t readers = 1;    // of the same keys, for which the memory is read once
  double busy_share = 0;  // what each of an SM's blocks keeps the SM busy

  double of(double share) const {
    // Readers of the same keys presumably drift apart, and read some of them from memory again.
    constexpr double kSharedSlow = 1.1;
    const double slow = readers > 1 ? kSharedSlow : 1;
    return std::max(
        {least_share, share * slow / static_cast<double>(readers), busy_share * std::ceil(share)});
  }
};

// Estimated time of a call, in units of the time that the whole device needs to read one tile of
// keys for each SM. docs/kernels/decode.md says from which sweeps the constants are.
struct DecodeCost {
  int64_t row_tiles;
  int tiles;  // of keys that one row tile sees, kDecodeWarps warps wide
  int num_sms;
  int64_t resident;  // blocks, of all SMs
  double tile_time;  // of reading a tile: 1 for 16 bits
  Reading reading;
  double merge_time;  // of the results of one piece of each sequence, written and read

  double of(int splits) const {
    constexpr double kBlockOverhead = 0.25;  // start and end of a block
    constexpr double kCombine = 0.8, kCombinePerSplit = 0.01;
    const int64_t blocks = row_tiles * splits;
    const double block = tile_time * ((tiles + splits - 1) / splits) + kBlockOverhead;
    const double full_wave = block * reading.of(static_cast<double>(resident / num_sms));
    const double full_waves = full_wave * static_cast<double>(blocks / resident);
    const double share = static_cast<double>(blocks % resident) / num_sms;
    const double last_wave = share == 0 ? 0 : block * reading.of(share);
    const double piece = kCombinePerSplit + merge_time;
    return full_waves + last_wave + (splits > 1 ? kCombine + piece * splits : 0);
  }
};

// The thread blocks of decode.cuh that the device holds at a time.
int64_t resident_blocks(const CallShape& call) {
  const int block_kib = (is_8bit(call.cache_dtype) ? 64 : 96) + 1;  // 1 KiB is the system's
  const bool two = call.device->smem_optin_bytes >= (2 * block_kib - 1) * 1024;
  return int64_t{call.device->num_sms} * (two ? 2 : 1);
}

// Row tiles of the whole call, each of which reads the keys of its sequence and kv head once.
int64_t all_row_tiles(const CallShape& call) {
  return row_tiles(call) * call.heads_kv * call.batch;
}

// Whether several row tiles read the same keys, at the same time. Calls of one token were timed
// without this, and keep their pieces.
bool shares_reads(const CallShape& call) {
  return call.tokens > 1 && row_tiles(call) > 1 && !is_8bit(call.cache_dtype);
}

// Half of the SMs saturate the memory, all of them where page numbers are looked up. Of 8 bits a
// block has three quarters as much under way. Shared reads come from the L2 cache, which answers
// sooner, and then the SMs are the limit: with narrow tiles, above d = 128, they have more to do.
Reading reading(const CallShape& call) {
  constexpr double kWideSlow = 1.25, kPagesSlow = 1.2;
  if (!shares_reads(call)) {
    return {.least_share = call.paged ? 0.97 : is_8bit(call.cache_dtype) ? 0.65 : 0.49};
  }
  const double slow = (widest(call) > 128 ? kWideSlow : 1) * (call.paged ? kPagesSlow : 1);
  return {.least_share = 0.44 * slow, .readers = row_tiles(call), .busy_share = 0.36 * slow};
}

DecodeCost decode_cost(const CallShape& call) {
  const int tile_keys = with_head_dim_class(static_cast<int>(widest(call)), [&]<int kHeadDim> {
    return kDecodeTile<kHeadDim>.keys * kDecodeWarps;
  });
  const auto result_bytes =
      static_cast<double>(8 * call.batch * call.heads_q * call.tokens * call.head_dim_v);
  return {
      .row_tiles = all_row_tiles(call),
      .tiles = static_cast<int>(ceil_div(most_keys(call), tile_keys)),
      .num_sms = call.device->num_sms,
      .resident = resident_blocks(call),
      .tile_time = is_8bit(call.cache_dtype) ? 0.5 : 1,
      .reading = reading(call),
      .merge_time = shares_reads(call)
                        ? result_bytes / static_cast<double>(kReadBytes * call.device->num_sms)
                        : 0,
  };
}

// Into how many equal pieces each sequence is cut, by the cost of a call.
int best_num_splits(const CallShape& call) {
  constexpr int kMaxSplits = 256;
  // More blocks than there is room for pay where each waits for its own reads, and not where they
  // share them.
  const int64_t always_tried = shares_reads(call) ? 1 : 4;
  const DecodeCost cost = decode_cost(call);
  int best = 1;
  double best_cost = cost.of(1);
  const int64_t one_wave = cost.resident / cost.row_tiles;
  const int64_t most =
      std::min<int64_t>({cost.tiles, kMaxSplits, std::max(one_wave, always_tried)});
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
bool cuts_by_length(const CallShape& call) {
  constexpr int64_t kLongBytes = int64_t{256} << 20;
  constexpr int kShortKeys = 2048;
  const int64_t keys = most_keys(call);
  // There are enough whole sequences for blocks that come and go to even out.
  const bool even = keys <= kShortKeys && all_row_tiles(call) >= 2 * resident_blocks(call);
  return call.paged && call.batch > 1 && !even &&
         2 * call.batch * keys * call.heads_kv * (call.head_dim + call.head_dim_v) > kLongBytes;
}

// Pieces that run at a time.
int pieces_at_once(const CallShape& call) {
  const int64_t blocks_per_piece = row_tiles(call) * call.heads_kv;
  return static_cast<int>(std::max<int64_t>(resident_blocks(call) / blocks_per_piece, 1));
}

// Whole sequences, of which a thread block takes one after the other: most have nothing to do.
Splits rest_splits(const CallShape& call) {
  const auto keys = static_cast<int>(ceil_div(call.capacity, kLineKeys) * kLineKeys);
  return Splits::by_length(keys, 1, pieces_at_once(call), 0);
}

Splits decode_splits(const CallShape& call) {
  // 4096 rather than 2048: half the merges.
  constexpr int kPieceKeys = 4096, kMostWaves = 8;
  if (call.num_splits > 0) {
    return Splits::alike(static_cast<int>(call.num_splits), call.batch_invariant);
  }
  if (!call.batch_invariant && !cuts_by_length(call)) {
    return Splits::alike(best_num_splits(call));
  }
  const int keys = call.batch_invariant ? kInvariantKeys : kPieceKeys;
  const int least_pieces = pieces_at_once(call);
  return Splits::by_length(keys, static_cast<int>((call.capacity - 1) / keys + 1), least_pieces,
                           call.batch_invariant ? 0 : kMostWaves * least_pieces);
}

KvcacheGrid kvcache_grid(const CallShape& call) {
  // fp32: one block an SM reads as fast as two and leaves half as many pieces; two fill the device
  // better where there are many heads. 8 bits: four warps that compute wait for one another more
  // than for memory, so two blocks, unless the call is short, or has a bias, for which two have no
  // registers. 1 KiB a block is the system's, and the blocks that merge want to be there early.
  constexpr int kSystemBytes = 1024, kCombineBytes = 17 * 1024, kTwoBlocksBytes = 160 * 1024;
  constexpr int64_t kLongElements = int64_t{64} << 20;
  const DeviceInfo& device = *call.device;
  const int items = static_cast<int>(call.heads_kv * row_tiles(call));
  const int64_t elements = call.batch * call.capacity * call.heads_kv * widest(call);
  const bool profits = is_8bit(call.cache_dtype) ? elements > kLongElements && !call.bias
                                                 : items > device.num_sms / 5;
  const bool two = profits && widest(call) <= 128 && device.smem_optin_bytes >= kTwoBlocksBytes;
  const int smem_bytes = device.smem_optin_bytes - kCombineBytes;
  return {.parts = std::max(device.num_sms * (two ? 2 : 1) / items, 1),
          .blocks_per_sm = two ? 2 : 1,
          .smem_bytes = two ? smem_bytes / 2 - kSystemBytes : smem_bytes,
          .smem_optin_bytes = device.smem_optin_bytes};
}

// Whole sequences need no merge, which is most of a short call. Longer ones must fill the device.
bool keeps_whole(const CallShape& call, const KvcacheGrid& grid) {
  constexpr int kShortKeys = 2048;
  const int64_t keys = most_keys(call), rounds = ceil_div(call.batch, grid.parts);
  if (keys <= (is_8bit(call.cache_dtype) ? 512 : 256)) return true;
  return keys <= kShortKeys && 10 * call.batch >= 9 * rounds * grid.parts;
}

Splits kvcache_splits(const CallShape& call, const KvcacheGrid& grid) {
  if (call.num_splits > 0) {
    return Splits::alike(static_cast<int>(call.num_splits), call.batch_invariant);
  }
  if (!call.batch_invariant) {
    return keeps_whole(call, grid) ? Splits::alike(1) : Splits::dealt_out();
  }
  // Left padding may add a piece.
  return Splits::by_length(kInvariantKeys, static_cast<int>(call.capacity / kInvariantKeys + 2));
}

bool has_terms(const CallShape& call) { return call.softcap || call.alibi || call.bias; }

// What decode.cuh serves, the faster kernel.
bool serves_16bit(const CallShape& call) {
  return call.cache_dtype == call.dtype && call.dtype != DType::kFp32 &&
         widest(call) <= kDecodeHeadDim;
}
// Pages of 8 bits are read faster by kvcache.cuh.
bool serves_8bit(const CallShape& call) {
  return is_8bit(call.cache_dtype) && !has_terms(call) && !call.rotates &&
         widest(call) <= kDecode8BitHeadDim && !call.paged;
}

int64_t sequence_rows(const CallShape& call) { return call.tokens * call.heads_q / call.heads_kv; }

// Leading pages that sequences share are read once: prefix.cuh. Queries have been rotated before.
bool reads_prefix_once(const CallShape& call) {
  return call.shares_prefix && call.paged && serves_16bit(call) && !has_terms(call) &&
         !call.batch_invariant && call.head_dim <= kPrefixHeadDim &&
         call.head_dim == call.head_dim_v && call.batch <= kPrefixMostSequences &&
         sequence_rows(call) <= kPrefixRows;
}

// A shared prefix is cut into as many pieces as fill the device if all sequences share one.
int prefix_pieces(const CallShape& call) {
  constexpr int64_t kMostPieces = 32, kLeastKeys = 256;
  const int64_t members = prefix_tile_rows(static_cast<int>(call.head_dim)) / sequence_rows(call);
  const int64_t blocks = ceil_div(call.batch, members) * call.heads_kv;
  return static_cast<int>(
      std::clamp<int64_t>(resident_blocks(call) / blocks, 1,
                          std::min(kMostPieces, ceil_div(call.capacity, kLeastKeys))));
}

// How what a sequence has beyond the shared keys is cut. Nobody knows how long it is: thread blocks
// without keys end at once.
Splits own_splits(const CallShape& call) {
  constexpr int64_t kMostPieces = 4;
  if (call.num_splits > 0) return Splits::alike(static_cast<int>(call.num_splits));
  return Splits::alike(static_cast<int>(
      std::clamp<int64_t>(resident_blocks(call) / (2 * all_row_tiles(call)), 1, kMostPieces)));
}

bool is_empty(const CallShape& call) { return call.batch * call.tokens * call.heads_q == 0; }

}  // namespace

Plan plan_decode(const CallShape& call) {
  const auto batch = static_cast<int>(call.batch);
  const int64_t rows_of_sequence = call.heads_q * call.tokens;
  const bool decode = serves_16bit(call) || serves_8bit(call);
  Plan plan = {.kernel = decode ? Kernel::kDecode : Kernel::kKvcache,
               .max_logits_apart = call.max_logits && changes_logits(call)};
  if (is_empty(call)) return plan;
  if (reads_prefix_once(call)) {
    plan.kernel = Kernel::kDecode;
    plan.splits = own_splits(call);
    plan.prefix_pieces = prefix_pieces(call);
    plan.workspace_rows = batch * (plan.splits.count + plan.prefix_pieces) * rows_of_sequence;
    return plan;
  }
  if (plan.kernel == Kernel::kDecode) {
    plan.splits = decode_splits(call);
    if (is_cut(plan.splits))
      plan.workspace_rows = decode_pieces(batch, plan.splits) * rows_of_sequence;
    return plan;
  }
  return plan_kvcache(call, plan.kernel, kvcache_grid(call));
}

Plan plan_kvcache(const CallShape& call, Kernel kernel, const KvcacheGrid& grid) {
  Plan plan = {.kernel = kernel,
               .splits = kvcache_splits(call, grid),
               .grid = grid,
               .max_logits_apart = call.max_logits && changes_logits(call)};
  if (plan.splits.count == 1) return plan;
  const int64_t pieces =
      plan.splits.count == 0 ? 2 * int64_t{grid.parts} : call.batch * plan.splits.count;
  plan.workspace_rows = pieces * call.heads_q * call.tokens;
  return plan;
}

bool is_for_decode(const CallShape& call) {
  if (call.device == nullptr || is_empty(call)) return true;
  // What the forward would have to copy first, as fits_boxes() of the bindings says.
  const bool has_short_window =
      call.window_left >= 0 && call.window_left + 1 < PageTable::kMultiple;
  const bool is_copied = call.paged && (call.odd_pages || has_short_window);
  const bool shares_rows =
      row_tiles(call) > 1 && call.heads_q > call.heads_kv && call.head_dim == call.head_dim_v;
  return has_few_tokens(call) && (call.ragged || call.shares_prefix || is_copied || !shares_rows);
}

double decode_time(const CallShape& call) {
  constexpr double kLaunch = 3.8;
  // Two more kernels bring the queries side by side and the results to their places, and keys do not
  // begin where a sequence's row does.
  constexpr double kGather = 5, kGatherSlow = 1.35;
  if (is_empty(call)) return 0;
  const double launch = kLaunch + (call.gathers ? kGather : 0);
  const double slow = call.gathers ? kGatherSlow : 1;
  if (!serves_16bit(call) && !serves_8bit(call)) {
    const auto keys = static_cast<double>(all_row_tiles(call) * most_keys(call));
    return launch + slow * keys * decode_key_time(call) / call.device->num_sms;
  }
  // In some classes tiles have three quarters of kReadBytes.
  const double tile_time = with_head_dim_class(static_cast<int>(widest(call)), [&]<int kHeadDim> {
    constexpr int kTileBytes = 4 * kHeadDim * kDecodeTile<kHeadDim>.keys * kDecodeWarps;
    return kReadTime * kTileBytes / kReadBytes;
  });
  const int splits =
      call.num_splits > 0 ? static_cast<int>(call.num_splits) : best_num_splits(call);
  return launch + slow * tile_time * decode_cost(call).of(splits);
}

Plan plan_forward_on_cache(const CallShape& call, int pieces) {
  Plan plan = {.kernel = Kernel::kFwd, .splits = Splits::alike(pieces)};
  if (is_empty(call)) return plan;
  if (pieces > 1) plan.workspace_rows = call.batch * pieces * call.heads_q * call.tokens;
  if (call.paged && serves_16bit(call)) {
    plan.rest = Kernel::kDecode;
    plan.rest_splits = rest_splits(call);
  } else if (call.paged) {
    plan.grid = kvcache_grid(call);
  }
  return plan;
}

}  // namespace flash_attn::cuda
