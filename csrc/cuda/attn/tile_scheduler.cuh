// Turns a thread block's number into the (sequence, head, block of rows) that it works on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../core/divisor.h"
#include "../../core/failure.h"
#include "../../core/host_device.h"
#include "../../core/params.h"

namespace flash_attn {

struct TileCoordinates {
  int batch_idx;  // varlen: -1, `batch` for the rows before the first, behind the last sequence
  int head;
  int block;  // of kBlock rows
};

// Every query of every sequence sees all keys, of which there are as many.
inline bool sequences_are_alike(const AttnParams& params) {
  return params.window_left < 0 && params.window_right < 0 && params.cu_seqlens_q == nullptr &&
         params.cu_seqlens_k == nullptr && params.seqused_q == nullptr &&
         params.seqused_k == nullptr && params.leftpad_k == nullptr;
}

// Which blocks of a sequence come first: with a causal mask the last queries see most keys, and the
// first keys are seen by most queries.
enum class TileOrder { kLastBlocksFirst, kFirstBlocksFirst, kAsTold };

// Blocks of kBlock rows of q (forward; dQ) or of k (dK, dV) over all sequences and heads.
//
// Dense: heads are taken in sections whose K and V stay in the L2 cache together; inside a section
// the longest blocks of all its heads come first, so that the last blocks to start are short ones.
// Where sections do not divide the heads, the first one is the smaller: as the last it would have
// too few short blocks to fill the gaps. For the same reason the caller may ask for a larger last
// one.
//
// Varlen: the lengths are on the device, so the grid is sized from total and batch: sequence b owns
// the tiles [T(b), T(b + 1)) of a head with T(b) = ⌊cu_seqlens[b] / kBlock⌋ + b + 1. It is enough,
// as ⌈(y - x) / B⌉ <= ⌊y / B⌋ - ⌊x / B⌋ + 1, and costs at most one empty tile a sequence; the
// caller's max_seqlen is not trusted. T ascends, so a warp finds its b by a 32-ary search. Numbers
// -1 and `batch` own the rows before the first and behind the last sequence.
template <int kBlock, TileOrder kOrder = TileOrder::kLastBlocksFirst>
struct TileScheduler {
  const int32_t* cu_seqlens;  // null: dense
  int64_t total;              // varlen: rows of the tensor
  int batch;
  Count heads;
  Count blocks_per_head = 1;  // of one sequence; varlen: tiles of all sequences
  Count section_heads = 1;    // (batch, head) pairs in a section
  bool last_blocks_first = kOrder == TileOrder::kLastBlocksFirst;  // may be set for kAsTold
  Count last_section_heads = 0;  // likewise; 0: as many as in the others
  // Varlen, likewise: all heads of a sequence come before the next sequence, not all sequences of a
  // head before the next head.
  bool sequence_by_sequence = false;

  // bytes_per_head: what one (batch, head) reads over and over, K and V in the forward.
  static TileScheduler make(const int32_t* cu_seqlens, int64_t total, int seqlen, int batch,
                            int heads, int64_t bytes_per_head) {
    constexpr int64_t kSectionBytes = 32 << 20;  // of an L2 of 40 to 60 MB
    TileScheduler scheduler{
        .cu_seqlens = cu_seqlens, .total = total, .batch = batch, .heads = heads};
    const int64_t blocks = cu_seqlens == nullptr ? (int64_t{seqlen} + kBlock - 1) / kBlock
                                                 : total / kBlock + batch + 2;
    const int64_t pairs = cu_seqlens == nullptr ? int64_t{batch} * heads : heads;
    if (blocks * pairs > INT32_MAX) {
      fail({"flash_attn: batch * heads * seqlen: expected at most ", INT32_MAX, " tiles of ",
            kBlock, " rows, got ", blocks * pairs});
    }
    scheduler.blocks_per_head = static_cast<int>(blocks);
    scheduler.section_heads = static_cast<int>(std::clamp<int64_t>(
        kSectionBytes / std::max<int64_t>(bytes_per_head, 1), 1, std::max<int64_t>(pairs, 1)));
    return scheduler;
  }

  FLASH_ATTN_HOST_DEVICE int num_tiles() const {
    return blocks_per_head * (cu_seqlens == nullptr ? batch : 1) * heads;
  }

#ifdef __CUDACC__
  // Called by whole warps; the same for all threads of a block. A varlen tile may lie behind its
  // sequence's rows.
  __device__ __forceinline__ TileCoordinates tile(int tile_idx) const {
    return cu_seqlens == nullptr ? dense_tile(tile_idx) : varlen_tile(tile_idx);
  }

  // T(batch_idx) of varlen sequences.
  __device__ __forceinline__ int first_tile(int batch_idx) const {
    if (batch_idx < 0) return 0;
    const int64_t row = min(max(int64_t{cu_seqlens[batch_idx]}, int64_t{0}), total);
    return static_cast<int>(row / kBlock) + batch_idx + 1;
  }

 private:
  __device__ __forceinline__ TileCoordinates dense_tile(int tile_idx) const {
    int last_pair = batch * heads;  // of which a larger last section begins
    if constexpr (kOrder == TileOrder::kAsTold) {
      last_pair -= last_section_heads;
      const int in_section = tile_idx - last_pair * blocks_per_head;
      if (in_section >= 0) return of_section(last_pair, last_section_heads, in_section);
    }
    const int remainder = last_pair % section_heads;  // heads of a first, smaller section
    const int behind = tile_idx - remainder * blocks_per_head;
    if (behind < 0) return of_section(0, remainder, tile_idx);
    const int section = behind / blocks_per_head / section_heads;
    return of_section(remainder + section * section_heads, section_heads,
                      behind - section * section_heads * blocks_per_head);
  }

  // The tile that comes in_section-th among those of some (batch, head) pairs. Pairs: an int or a
  // Count.
  template <typename Pairs>
  __device__ __forceinline__ TileCoordinates of_section(int first_pair, const Pairs& pairs,
                                                        int in_section) const {
    const int pair = first_pair + in_section % pairs;
    return {.batch_idx = pair / heads,
            .head = pair % heads,
            .block = in_order(in_section / pairs, blocks_per_head)};
  }

  __device__ __forceinline__ TileCoordinates varlen_tile(int tile_idx) const {
    const bool by_sequence = kOrder == TileOrder::kAsTold && sequence_by_sequence;
    int head = tile_idx / blocks_per_head;
    int tile_of_head = by_sequence ? tile_idx / heads : tile_idx % blocks_per_head;
    int low = -1, high = batch + 1;  // T(low) <= tile_of_head < T(high)
    while (high - low > 1) {
      const int step = (high - low + 31) / 32;
      const int probe = low + static_cast<int>(threadIdx.x % 32) * step;
      const bool before = probe < high && first_tile(probe) <= tile_of_head;
      low += max(__popc(__ballot_sync(~0u, before)) - 1, 0) * step;
      high = min(low + step, high);
    }
    const int next = low == batch ? int{blocks_per_head} : first_tile(low + 1);
    const int first = kOrder == TileOrder::kLastBlocksFirst ? 0 : first_tile(low);
    // Only where cu_seqlens does not ascend is a tile not among those of the sequence;
    // blocks_per_head lies behind all rows.
    const bool is_own = first <= tile_of_head && tile_of_head < next;
    if (by_sequence && is_own) {
      const int in_sequence = tile_idx - first * heads;
      head = in_sequence / (next - first);
      tile_of_head = first + in_sequence % (next - first);
    }
    const int block = is_own ? in_order(tile_of_head - first, next - first) : int{blocks_per_head};
    return {.batch_idx = low, .head = head, .block = block};
  }

  // The block that comes index-th among `count`.
  __device__ __forceinline__ int in_order(int index, int count) const {
    const bool last_first =
        kOrder == TileOrder::kAsTold ? last_blocks_first : kOrder == TileOrder::kLastBlocksFirst;
    return last_first ? count - 1 - index : index;
  }
#endif
};

}  // namespace flash_attn
