#include "mask_order.h"

#include "../cuda/attn/block_range.cuh"
#include "../cuda/launch.h"
#include "../cuda/ptx/griddepcontrol.cuh"
#include "masked_scores.cuh"

namespace flash_attn::sm90 {
namespace {

// With more tiles a head, each is so small a share of a thread block's that their order does not
// matter, and it would take long to find.
constexpr int kMostTiles = 256;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// The heads of a mask whose tiles are ordered each on its own, and how many blocks the tiles meet.
struct OrderedHeads {
  int batch, heads;  // 1 in a dimension that the mask broadcasts
  int group;         // query heads of the mask that one of these stands for
  int tiles;         // of a head

  OrderedHeads(const AttnParams& params, const TileMask& mask, bool of_keys)
      : batch(mask.batch_stride == 0 ? 1 : params.batch),
        heads(mask.head_stride == 0 ? 1
              : of_keys             ? params.heads_kv
                                    : params.heads_q),
        group(mask.head_stride != 0 && of_keys ? params.heads_q / params.heads_kv : 1),
        tiles(((of_keys ? params.seqlen_k : params.seqlen_q) + kOrderedRows - 1) / kOrderedRows) {}

  int64_t size() const { return tiles > kMostTiles ? 0 : int64_t{batch} * heads * tiles; }
};

// Adds to counts, for each tile of a head, how many blocks it meets that it sees something of. All
// threads call it. Lanes lie side by side along the keys, as the states of tiles do in memory.
template <bool kOfKeys>
__device__ __forceinline__ void count_blocks(const Masked<AttnParams>& params,
                                             const OrderedHeads& ordered, int head, int* counts) {
  // The backward has blocks of 64 or 128 queries, and the forward of 64 or 128 keys. One of these
  // serves to compare.
  constexpr int kBlockM = kOfKeys ? 64 : kOrderedRows, kBlockN = kOrderedRows;
  const AttentionWindow window(params, params.seqlen_q, params.seqlen_k);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < ordered.group; ++i) {
    const BlockMask mask(params, head / ordered.heads, head % ordered.heads * ordered.group + i, 0);
    const auto sees = [&](int m, int n) {
      return mask.states<kBlockM, kBlockN>(m * kBlockM, n * kBlockN) != 0;
    };
    if constexpr (kOfKeys) {
      for (int tile = lane; tile < ordered.tiles; tile += 32) {
        const BlockRange range = BlockRange::of_queries<kBlockM, kBlockN>(window, tile * kBlockN);
        int seen = 0;
#pragma unroll 4
        for (int m = range.begin + warp; m < range.end; m += kWarps) seen += sees(m, tile);
        atomicAdd(&counts[tile], seen);
      }
    } else {
      for (int tile = warp; tile < ordered.tiles; tile += kWarps) {
        const BlockRange range = BlockRange::of_keys<kBlockM, kBlockN>(window, tile * kBlockM);
        int seen = 0;
#pragma unroll 4
        for (int n = range.begin + lane; n < range.end; n += 32) seen += sees(tile, n);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          seen += __shfl_xor_sync(~0u, seen, distance);
        }
        if (lane == 0) counts[tile] += seen;
      }
    }
  }
}

// Each thread block orders the tiles of one head. of_keys: tiles of keys, in the backward.
template <bool kOfKeys>
__global__ void __launch_bounds__(kThreads)
    order_mask_tiles_kernel(const __grid_constant__ Masked<AttnParams> params, OrderedHeads ordered,
                            int32_t* order, int32_t* tile_counter) {
  constexpr int kOfTile = kThreads / kMostTiles;  // threads that place a tile
  __shared__ int ranks[kMostTiles];
  flash_attn::ptx::launch_dependents();
  const int head = blockIdx.x, tiles = ordered.tiles;
  if (head == 0 && threadIdx.x == 0) *tile_counter = 0;
  if (threadIdx.x < kMostTiles) ranks[threadIdx.x] = 0;
  __syncthreads();
  count_blocks<kOfKeys>(params, ordered, head, ranks);
  __syncthreads();
  if (threadIdx.x < kMostTiles) {
    // Among tiles with as many blocks those come first that would without an order.
    const int of_equals = kOfKeys ? kMostTiles - 1 - threadIdx.x : threadIdx.x;
    ranks[threadIdx.x] = min(ranks[threadIdx.x], (1 << 23) - 1) << 8 | of_equals;
  }
  __syncthreads();
  const int tile = threadIdx.x / kOfTile, rank = ranks[tile];
  int place = 0;
#pragma unroll 8
  for (int other = threadIdx.x % kOfTile; other < tiles; other += kOfTile) {
    place += ranks[other] > rank;
  }
#pragma unroll
  for (int distance = 1; distance < kOfTile; distance *= 2) {
    place += __shfl_xor_sync(~0u, place, distance);
  }
  if (tile < tiles && threadIdx.x % kOfTile == 0) order[head * tiles + place] = tile;
}

template <bool kOfKeys, typename Params>
MaskOrder order_tiles(const Masked<Params>& params, int32_t* room, const cuda::DeviceInfo& device,
                      Stream stream) {
  const OrderedHeads ordered(params, params.mask, kOfKeys);
  const int64_t heads = kOfKeys ? params.heads_kv : params.heads_q;
  if (ordered.size() == 0 || params.batch * heads * ordered.tiles <= device.num_sms) return {};
  cuda::launch<order_mask_tiles_kernel<kOfKeys>>(
      ordered.batch * ordered.heads, kThreads, 0, stream,
      Masked<AttnParams>{static_cast<const AttnParams&>(params), params.mask}, ordered, room,
      params.tile_counter);
  const int head_stride = ordered.heads == 1 ? 0 : ordered.tiles;
  const int batch_stride = ordered.batch == 1 ? 0 : ordered.heads * ordered.tiles;
  return {.tiles = room, .batch_stride = batch_stride, .head_stride = head_stride};
}

}  // namespace

int64_t mask_order_size(const Masked<FwdParams>& params) {
  return OrderedHeads(params, params.mask, false).size();
}
int64_t mask_order_size(const Masked<BwdParams>& params) {
  return OrderedHeads(params, params.mask, true).size();
}

MaskOrder order_mask_tiles(const Masked<FwdParams>& params, int32_t* room,
                           const cuda::DeviceInfo& device, Stream stream) {
  return order_tiles<false>(params, room, device, stream);
}
MaskOrder order_mask_tiles(const Masked<BwdParams>& params, int32_t* room,
                           const cuda::DeviceInfo& device, Stream stream) {
  return order_tiles<true>(params, room, device, stream);
}

}  // namespace flash_attn::sm90
