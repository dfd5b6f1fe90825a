// Decode of sequences that share leading pages: the shared keys are read once for all of them.
//
//   S = softmax_scale · Q Kᵀ → mask → softmax → O = P V, over one piece of the keys → (o, lse)
//
// Thread blocks of two kinds take turns, so that each multiprocessor has both: some read what a
// sequence has beyond its shared keys, as decode.cuh does, and want memory; the others want tensor
// cores. Their rows are those of all sequences that share a prefix: one kv head, all rows of some
// sequences (64 or 128 at most, 16 or 32 a warp), and a piece of the prefix. Their warps bring
// tiles of 64 keys (of 32 above d = 128) into a ring that they share, a quarter of each:
//
//   wait K, V(j)   barrier   copy K, V(j + stages - 1)   S = Q K(j)ᵀ   mask, softmax   O += P V(j)
//
// The barrier says both that tile j is there and that nobody reads tile j - 1 any more, whose stage
// the copies take. A warp without rows only copies.
//
// Which sequences share, only the device knows: each block finds its rows first (find_members).
// Every row sees as much of the prefix as its own sequence has, and skips that much of its own
// keys, so the result is right whatever stands in SharedPrefix. One merge takes all pieces.
#pragma once

#include <climits>

#include "../ptx/opaque.cuh"
#include "decode.cuh"
#include "prefix_config.h"

namespace flash_attn::cuda {

template <DType kDTypeOfCache, int kHeadDimOfTile>
struct PrefixTraits {
  static constexpr DType kDType = kDTypeOfCache;
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimOfTile;
  // Blocks of 16 rows a warp, at most. Two read each tile of keys half as often from shared memory.
  static constexpr int kRows = prefix_tile_rows(kHeadDim);
  static constexpr int kMostRowBlocks = kRows / (16 * kPrefixWarps);
  static constexpr int kBlockKeys = kHeadDim <= 128 ? 64 : 32;  // of a tile
  static constexpr int kKeys = kBlockKeys / kPrefixWarps;       // of it that a warp copies
  static constexpr int kStages = kHeadDim == 128 ? 2 : 3;       // tiles of K, and as many of V
  static constexpr int kElementBytes = 2;
  static constexpr int kTilesAhead = 2;
  static constexpr int kThreads = 32 * kPrefixWarps;
  static constexpr int kBlocksPerSm = 2;
  using QTile = SmemTile<Element, kRows, kHeadDim>;
  using KvTile = SmemTile<Element, kBlockKeys, kHeadDim>;
  using KeyBits = uint64_t;
};

// Which kv head, which piece of the shared keys and which tile of rows a thread block takes.
struct PrefixBlock {
  int tile, kv_head, piece;

  // Neighbouring blocks read the same keys, then neighbouring memory.
  __device__ __forceinline__ static PrefixBlock of(const PrefixGrid& grid,
                                                   const DecodeParams& params, int number) {
    const int head = grid.tiles.divide(number), piece = grid.heads_kv.divide(head);
    return {number - head * grid.num_tiles, head - piece * params.heads_kv, piece};
  }
};

template <typename Traits>
struct PrefixStorage {
  typename Traits::QTile q;
  union {
    struct {
      typename Traits::KvTile k[Traits::kStages], v[Traits::kStages];
    } ring;
    struct {
      int source[kPrefixMostSequences], members[kPrefixMostSequences];
    } search;
  };
  uint64_t valid[Traits::kStages][kPrefixWarps];  // one bit a key of the warp's share of a K tile
  int members[Traits::kRows];                     // sequences of the tile
  int num_members, source;                        // source -1: there is no such tile
  PrefixBlock block;                              // here, as registers are short
  int first_of_row[Traits::kRows], end_of_row[Traits::kRows];  // the keys that a row sees
  int first_key[kPrefixWarps], end_key[kPrefixWarps];  // and those that any of a warp's does
};

// Brings the sequences of tile smem.block.tile into smem.members. Tiles are counted in the order of
// the sequences that begin them. Each has `tile_members` sequences of one source, but for the last
// tile of a source. The whole block calls it.
template <typename Storage>
__device__ __forceinline__ void find_members(Storage& smem, const DecodeParams& params,
                                             const SharedPrefix& prefix, const PrefixGrid& grid) {
  const int batch = params.batch, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < batch; i += blockDim.x) {
    smem.search.source[i] = prefix.source_of(i, batch);
    smem.search.members[i] = 0;  // found so far of this source
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int source = -1, first_rank = 0, tiles = 0;
    for (int base = 0; base < batch; base += 32) {
      const int batch_idx = base + lane;
      const int own = batch_idx < batch ? smem.search.source[batch_idx] : -1;
      const unsigned peers = __match_any_sync(~0u, own);
      const int before = own < 0 ? 0 : smem.search.members[own];
      const int rank = before + __popc(peers & ((1u << lane) - 1));
      __syncwarp();  // all have read
      if (own >= 0 && peers >> lane == 1) smem.search.members[own] = rank + 1;
      __syncwarp();
      const int tile_of_source = grid.members.divide(rank);
      if (source < 0) {
        const bool begins = own >= 0 && rank == tile_of_source * grid.tile_members;
        const unsigned beginnings = __ballot_sync(~0u, begins);
        const int place = tiles + __popc(beginnings & ((1u << lane) - 1));
        const unsigned hit = __ballot_sync(~0u, begins && place == smem.block.tile);
        tiles += __popc(beginnings);
        if (hit != 0) {
          source = __shfl_sync(~0u, own, __ffs(hit) - 1);
          first_rank = __shfl_sync(~0u, rank, __ffs(hit) - 1);
        }
      }
      const int place = rank - first_rank;
      if (source >= 0 && own == source && place >= 0 && place < grid.tile_members) {
        smem.members[place] = batch_idx;
      }
    }
    if (lane == 0) {
      smem.source = source;
      smem.num_members =
          source < 0 ? 0 : min(smem.search.members[source] - first_rank, grid.tile_members);
    }
  }
  __syncthreads();
}

// Says where a row of the tile lies in the call.
struct PrefixRow {
  int batch_idx, token, head;
  bool exists;

  template <typename Storage>
  __device__ __forceinline__ PrefixRow(const Storage& smem, const DecodeParams& params,
                                       const PrefixGrid& grid, int kv_head, int row) {
    const int member = grid.sequence_rows.divide(row);
    const int row_of_member = row - member * params.seqlen_q * params.group;
    exists = member < smem.num_members;
    batch_idx = smem.members[exists ? member : 0];
    token = grid.group.divide(row_of_member);
    head = kv_head * params.group + row_of_member - token * params.group;
  }
};

// Brings the keys of the prefix that each row of this warp sees into shared memory, and returns
// those that any of them sees, as {least, end}. A row that does not exist needs no mask.
template <typename Traits, int kRowBlocks>
__device__ __forceinline__ SequenceKeys find_keys(PrefixStorage<Traits>& smem,
                                                  const DecodeParams& params,
                                                  const SharedPrefix& prefix,
                                                  const PrefixGrid& grid,
                                                  const PrefixBlock& block) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  SequenceKeys any;
  any.first = INT_MAX;
  any.end = 0;
  if (lane < 16 * kRowBlocks) {
    const int row = warp * 16 * kRowBlocks + lane;
    const PrefixRow at(smem, params, grid, block.kv_head, row);
    int first = 0, end = INT_MAX;
    if (at.exists) {
      const int len_k = kvcache_len_k(params, at.batch_idx);
      const int diagonal = len_k - params.seqlen_q + at.token;
      const SequenceKeys seen(params, at.batch_idx, len_k, at.token, at.token);
      end = min(seen.end, prefix.lens[at.batch_idx]);  // its first key is one beyond lens
      first = min(params.window_left < 0 ? 0 : max(diagonal - params.window_left, 0), end);
      if (first < end) {
        any.first = first;
        any.end = end;
      }
    }
    smem.first_of_row[row] = first;
    smem.end_of_row[row] = end;
  }
  any.first = __reduce_min_sync(~0u, any.first);
  any.end = __reduce_max_sync(~0u, any.end);
  return any;
}

// Brings this warp's rows of Q into shared memory. Rows that do not exist and columns beyond are 0.
template <typename Traits, int kRowBlocks>
__device__ __forceinline__ void load_rows(PrefixStorage<Traits>& smem, const DecodeParams& params,
                                          const PrefixGrid& grid, const PrefixBlock& block) {
  constexpr int kChunks = Traits::kHeadDim / kChunk;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = lane; i < 16 * kRowBlocks * kChunks; i += 32) {
    const int row = warp * 16 * kRowBlocks + i / kChunks, col = i % kChunks * kChunk;
    const PrefixRow at(smem, params, grid, block.kv_head, row);
    const Strides& strides = params.q_strides;
    const auto* source = static_cast<const typename Traits::Element*>(params.q) +
                         at.batch_idx * strides.batch + at.token * strides.row +
                         at.head * strides.head + col;
    *reinterpret_cast<uint4*>(smem.q.pointer(row, col)) =
        at.exists && col < params.head_dim ? *reinterpret_cast<const uint4*>(source) : uint4{};
  }
  __syncwarp();
}

// Computes O = P V of this warp's rows over the keys [first_key, end_key) of `source`, and the
// state of their softmax. `computes` says whether the warp has rows.
template <typename Traits, int kRowBlocks>
__device__ __forceinline__ void attend_shared(Accumulator<kRowBlocks, Traits::kHeadDim>& O,
                                              OnlineSoftmax<2 * kRowBlocks>& softmax,
                                              PrefixStorage<Traits>& smem,
                                              const DecodeParams& params, const PrefixGrid& grid,
                                              const PrefixBlock& block, int first_key, int end_key,
                                              int source, bool computes) {
  using Element = typename Traits::Element;
  using KvTile = typename Traits::KvTile;
  constexpr int kStages = Traits::kStages, kBlockKeys = Traits::kBlockKeys;
  constexpr int kRows = 2 * kRowBlocks;
  const int warp = threadIdx.x / 32, thread_lane = threadIdx.x % 32;
  const int tiles = (end_key - first_key + kBlockKeys - 1) / kBlockKeys;
  const int warp_first_key = first_key + warp * Traits::kKeys;
  CacheLoader<Traits> cache(params, source, block.kv_head, first_key, end_key, warp_first_key,
                            thread_lane, warp * Traits::kKeys);
  // Appended tokens are the source's last.
  if (params.seqlen_new > 0 && end_key > kvcache_len_k(params, source) - params.seqlen_new) {
    ptx::wait_for_prerequisites();
  }
  int stage = 0;  // of the next copy in the ring, and the oldest one's, once all are taken
  const auto load = [&](int tile) {
    if (tile < tiles) {
      cache.locate(warp_first_key + tile * kBlockKeys);
      cache.keys(smem.ring.k[stage], smem.valid[stage][warp]);
      cache.values(smem.ring.v[stage]);
    }
    ptx::cp_async_commit();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  };
#pragma unroll 1
  for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
  load_rows<Traits, kRowBlocks>(smem, params, grid, block);
  const SmemOperandA<kRowBlocks, 16, Layout::kKInner, typename Traits::QTile> Q(
      smem.q, warp * 16 * kRowBlocks, thread_lane);
  // A row of the warp for each lane: a tile that all of them see whole needs no mask.
  const int row = warp * 16 * kRowBlocks + thread_lane % (16 * kRowBlocks);
  const int first_whole = __reduce_max_sync(~0u, smem.first_of_row[row]);
  const int end_whole = __reduce_min_sync(~0u, smem.end_of_row[row]);

#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();
    load(tile + kStages - 1);
    if (computes) {
#if __CUDA_ARCH__ < 900
      const auto lane = static_cast<int>(ptx::opaque(thread_lane));  // kept addresses spill
#else
      const int lane = thread_lane;
#endif
      const KvTile &K = smem.ring.k[stage], &V = smem.ring.v[stage];
      Accumulator<kRowBlocks, kBlockKeys> S;
      gemm_smem<Element, Traits::kHeadDim, Into::kZero>(
          S, Q, SmemOperandB<KvTile, Layout::kKInner>(K, 0, lane));
      const int key = first_key + tile * kBlockKeys;
      if (key < first_whole || key + kBlockKeys > end_whole) {
        int first[kRows], end[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int row = warp * 16 * kRowBlocks + i / 2 * 16 + fragment_row(i, lane);
          first[i] = smem.first_of_row[row] - key;
          end[i] = smem.end_of_row[row] - key;
        }
        mask_outside(S, first, end, lane);
      }
      uint64_t valid = 0;
#pragma unroll
      for (int w = 0; w < kPrefixWarps; ++w) valid |= smem.valid[stage][w] << w * Traits::kKeys;
      mask_absent(S, valid, lane);
      float correction[kRows];
      if (softmax.step(S, correction)) scale_rows(O, correction);
      gemm_register<Element>(O, to_operand_a<Element>(S),
                             SmemOperandB<KvTile, Layout::kKOuter>(V, 0, lane));
    }
  }
  ptx::cp_async_wait<0>();
  softmax.finish();
}

// Computes one tile of rows. The whole block calls it.
template <typename Traits, int kRowBlocks>
__device__ __forceinline__ void attend_prefix(PrefixStorage<Traits>& smem,
                                              const DecodeParams& params,
                                              const SharedPrefix& prefix, const PrefixGrid& grid,
                                              const PrefixBlock& block) {
  constexpr int kBlockKeys = Traits::kBlockKeys, kRows = 2 * kRowBlocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int piece = block.piece;
  const SequenceKeys of_warp = find_keys<Traits, kRowBlocks>(smem, params, prefix, grid, block);
  if (lane == 0) {
    smem.first_key[warp] = of_warp.first;
    smem.end_key[warp] = of_warp.end;
  }
  const int source = smem.source;
  __syncthreads();  // also: the search is over, its memory becomes the ring
  int first_key = INT_MAX, end_key = 0;
#pragma unroll
  for (int w = 0; w < kPrefixWarps; ++w) {
    first_key = min(first_key, smem.first_key[w]);
    end_key = max(end_key, smem.end_key[w]);
  }
  // Equal pieces of whole tiles, which begin at multiples of kBlockKeys.
  const int first_tile = min(first_key, end_key) / kBlockKeys;
  const int tiles = (end_key + kBlockKeys - 1) / kBlockKeys - first_tile;
  const int share = grid.pieces.divide(tiles), rest = tiles - share * prefix.pieces;
  const int begin = first_tile + piece * share + min(piece, rest);
  const int end = begin + share + (piece < rest ? 1 : 0);

  Accumulator<kRowBlocks, Traits::kHeadDim> O;
  O.fill(0.f);
  OnlineSoftmax<2 * kRowBlocks> softmax(params.softmax_scale);
  const bool computes = warp * 16 * kRowBlocks < smem.num_members * params.seqlen_q * params.group;
  attend_shared<Traits, kRowBlocks>(O, softmax, smem, params, grid, block, begin * kBlockKeys,
                                    min(end * kBlockKeys, end_key), source, computes);

  ptx::wait_for_prerequisites();  // whoever still reads the workspace
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const PrefixRow row(smem, params, grid, block.kv_head,
                        warp * 16 * kRowBlocks + i / 2 * 16 + fragment_row(i, lane));
    if (!row.exists) continue;
    const int64_t workspace_idx =
        int64_t{params.splits.count + piece} * params.batch + row.batch_idx;
    const int64_t partial_row = workspace_row(params, workspace_idx, row.head, row.token);
    const float factor = softmax.inverse_sum(i);
    float* destination = params.partial.o + partial_row * params.head_dim;
#pragma unroll
    for (int j = 0; j < O.kRowElements; j += 2) {
      const int col = fragment_col(j, lane);
      if (col >= params.head_dim) continue;
      *reinterpret_cast<float2*>(destination + col) = {O.at(i, j) * factor,
                                                       O.at(i, j + 1) * factor};
    }
    if (lane % 4 != 0) continue;
    params.partial.lse[partial_row] = softmax.log_sum_exp(i);
    const float largest = softmax.largest_score(i);
    if (params.max_logits != nullptr && largest != -INFINITY) {
      raise_to(params.max_logits + row.head, largest);
    }
  }
}

// What decode.cuh reads beside the shared keys lies in pages, too, in tiles of the same kHeadDim.
template <typename Traits>
using OwnTraits =
    DecodeTraits<Traits::kDType, Traits::kHeadDim, /*kPagedCache=*/true, /*kPlainCall=*/true>;

template <typename Traits>
union PrefixBlockStorage {
  PrefixStorage<Traits> shared;
  DecodeStorage<OwnTraits<Traits>> own;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    prefix_kernel(const __grid_constant__ DecodeParams params,
                  const __grid_constant__ SharedPrefix prefix,
                  const __grid_constant__ PrefixGrid grid,
                  const __grid_constant__ DecodeGrid own_grid) {
  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<PrefixBlockStorage<Traits>*>(smem_bytes);
  // Lengths may be another kernel's results, as in decode.cuh.
  if (params.seqlen_new == 0) ptx::wait_for_prerequisites();
  ptx::launch_dependents();
  const int pairs = min(grid.shared_blocks, grid.own_blocks), index = blockIdx.x;
  const bool alternates = index < 2 * pairs;
  const int number = alternates ? index / 2 : index - pairs;
  if (alternates ? index % 2 != 0 : grid.shared_blocks == pairs) {
    using Own = OwnTraits<Traits>;
    const DecodeBlock block(params, own_grid, number);
    decode_piece<Own>(
        smem.own, params,
        DecodePiece::of_split<Own::kKeys, Own::kPaged>(params, own_grid, block, kOwnTiles));
    return;
  }
  PrefixBlock& block = smem.shared.block;
  if (threadIdx.x == 0) block = PrefixBlock::of(grid, params, number);
#pragma unroll 1
  for (;;) {
    find_members(smem.shared, params, prefix, grid);
    if (smem.shared.source < 0) return;
    const int rows = smem.shared.num_members * params.seqlen_q * params.group;
    if (rows > 16 * kPrefixWarps) {  // more than a block of rows for each warp
      attend_prefix<Traits, Traits::kMostRowBlocks>(smem.shared, params, prefix, grid, block);
    } else {
      attend_prefix<Traits, 1>(smem.shared, params, prefix, grid, block);
    }
    __syncthreads();  // the ring's memory is searched again
    if (threadIdx.x == 0) block.tile += grid.num_tiles;
  }
}

template <DType kDType, int kHeadDim>
void launch_prefix(const DecodeParams& params, const SharedPrefix& prefix, Stream stream) {
  const DecodeGrid own_grid(params);
  using Traits = PrefixTraits<kDType, kHeadDim>;
  constexpr int kSmemBytes = sizeof(PrefixBlockStorage<Traits>);
  static_assert(kSmemBytes <= 99 * 1024);
  const PrefixGrid grid(params, prefix, Traits::kRows, own_grid);
  launch_overlapping<prefix_kernel<Traits>>(
      dim3(static_cast<unsigned>(grid.shared_blocks + grid.own_blocks)), Traits::kThreads,
      kSmemBytes, /*overlap=*/true, stream, params, prefix, grid, own_grid);
}

}  // namespace flash_attn::cuda
