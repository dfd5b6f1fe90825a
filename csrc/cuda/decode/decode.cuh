// Split-KV decode: a few new tokens of each sequence against its long KV cache.
//
//   S = softmax_scale · Q Kᵀ → mask → softmax → O = P V, over one piece of the keys → (o, lse)
//
// The time is that of reading K and V once, so all is arranged to keep reads under way. A thread
// block takes one kv head of one sequence, up to 16 of the (token, query head) pairs that read it,
// and a piece of the keys (pieces.cuh). Its warps share nothing but that: warp w takes the
// tiles w, w + 4, … of the piece through a ring of shared-memory stages of its own, in which K and V
// tiles take turns, and has its own running softmax. No block barrier until the end, where the warps'
// (o, lse) are merged. One warp, one tile:
//
//   wait K(j)   S = Q K(j)ᵀ   refill K(j)'s stage   mask, softmax   wait V(j)   O += P V(j)   refill
//
// so that stages - 1 tiles of the warp are under way whenever it waits, and the memory does not see
// the arithmetic between.
//
// Dense caches, by any row of the batch dimension, and pages. Other forms and score terms:
// kvcache.cuh.
//
// Shared memory, 96 KiB: the rings in the loop, the warps' outputs in the end. Q, S, P, O:
// registers.
#pragma once

#include <type_traits>

#include "../attn/block_range.cuh"
#include "../attn/mask.cuh"
#include "../attn/merge.cuh"
#include "../attn/online_softmax.cuh"
#include "../cache/loader.cuh"
#include "../launch.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../tile/gemm.cuh"
#include "config.h"
#include "pieces.cuh"

namespace flash_attn::cuda {

template <DType kDType, int kHeadDimOfTile, bool kPagedCache>
struct DecodeTraits {
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimOfTile;
  static constexpr int kKeys = kDecodeTile<kHeadDim>.keys;
  static constexpr int kStages = kDecodeTile<kHeadDim>.stages;
  static constexpr int kBlockKeys = kKeys * kDecodeWarps;
  static constexpr bool kPaged = kPagedCache;
  static constexpr int kThreads = 32 * kDecodeWarps;
  static constexpr int kBlocksPerSm = 2;
  using KvTile = SmemTile<Element, kKeys, kHeadDim>;
  using KeyBits = std::conditional_t<(kKeys > 32), uint64_t, uint32_t>;
  using Output = Accumulator<1, kHeadDim>;
};

template <typename Traits>
struct DecodeStorage {
  union {
    typename Traits::KvTile ring[kDecodeWarps][Traits::kStages];
    struct {
      // 8 floats more a row: the four rows that half a warp writes at once lie in different banks.
      float o[kDecodeWarps][kDecodeRows][Traits::kHeadDim + 8];
      float lse[kDecodeWarps][kDecodeRows];
    } warps;
  };
  // Pages: one bit a key of the K tile in the stage.
  typename Traits::KeyBits valid[kDecodeWarps][Traits::kStages];
};

struct AllKeys {};  // of a tile exist

// -inf for keys of pages that do not exist.
template <int kKeys>
__device__ __forceinline__ void mask_absent(Accumulator<1, kKeys>&, AllKeys, int) {}
template <int kKeys, typename KeyBits>
__device__ __forceinline__ void mask_absent(Accumulator<1, kKeys>& S, KeyBits valid, int lane) {
  constexpr KeyBits kAll = ~KeyBits{0} >> (8 * sizeof(KeyBits) - kKeys);
  if (valid == kAll) return;
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      if ((valid >> fragment_col(i, lane) & 1) == 0) S.at(row, i) = -INFINITY;
    }
  }
}

// One warp copies tiles of K, or of V, of a dense cache into shared memory.
template <typename Tile>
class WarpTileLoader {
  using Element = typename Tile::Element;
  static constexpr int kRowsAtOnce = 32 / Tile::kSlabChunks;  // 4, or 8 with slabs of 32 columns

 public:
  __device__ __forceinline__ WarpTileLoader(const void* cache, const Strides& strides,
                                            const DecodePiece& piece, int num_cols, int lane)
      : row_(lane / Tile::kSlabChunks),
        col_(lane % Tile::kSlabChunks * kChunk),
        num_cols_(num_cols),
        end_key_(piece.end_key),
        row_stride_(strides.row),
        source_(static_cast<const Element*>(cache) + piece.cache_row * strides.batch +
                piece.kv_head * strides.head + (piece.first_key + row_) * strides.row + col_),
        first_key_(piece.first_key) {}

  // Starts the copy of keys first_key + key_offset …; those at or beyond end_key become 0 unread.
  __device__ __forceinline__ void load(const Tile& tile, int key_offset) const {
    const Element* source = source_ + key_offset * row_stride_;
    const int rows_left = end_key_ - first_key_ - key_offset - row_;
    const uint32_t destination = tile.address(row_, col_);
#pragma unroll
    for (int row = 0; row < Tile::kRows; row += kRowsAtOnce) {
#pragma unroll
      for (int slab_col = 0; slab_col < Tile::kCols; slab_col += Tile::kSlabCols) {
        const bool valid = row < rows_left && slab_col + col_ < num_cols_;
        // Four rows further down flip the highest bit of the swizzle.
        ptx::cp_async_16(Tile::advance(destination ^ row % 8 * 16, row, slab_col),
                         source + slab_col, valid ? 16 : 0);
      }
      source += kRowsAtOnce * row_stride_;
    }
  }

 private:
  int row_, col_, num_cols_, end_key_;
  int64_t row_stride_;
  const Element* source_;
  int first_key_;
};

// A warp's loads of a piece, K and V in turns: load i is K(i / 2) or, if odd, V(i / 2).
template <typename Traits>
struct DenseLoader {
  using KvTile = typename Traits::KvTile;
  WarpTileLoader<KvTile> K, V;
  int warp;

  __device__ __forceinline__ DenseLoader(const DecodeParams& params, const DecodePiece& piece,
                                         int warp_of_block, int lane)
      : K(params.k_cache, params.k_strides, piece, params.head_dim, lane),
        V(params.v_cache, params.v_strides, piece, params.head_dim, lane),
        warp(warp_of_block) {}
  __device__ __forceinline__ void load(const KvTile& tile, int i, typename Traits::KeyBits&) const {
    (i % 2 == 0 ? K : V).load(tile, (warp + i / 2 * kDecodeWarps) * Traits::kKeys);
  }
  __device__ __forceinline__ AllKeys valid(const typename Traits::KeyBits&) const { return {}; }
};
template <typename Traits>
struct PagedLoader {
  CacheLoader<Traits> cache;

  __device__ __forceinline__ PagedLoader(const DecodeParams& params, const DecodePiece& piece,
                                         int warp, int lane)
      : cache(params, piece.batch_idx, piece.kv_head,
              max(piece.first_key, max(piece.window.first_key(piece.token(0)), piece.leftpad)),
              piece.end_key, piece.first_key + warp * Traits::kKeys, lane) {}
  __device__ __forceinline__ void load(const typename Traits::KvTile& tile, int i,
                                       typename Traits::KeyBits& valid) {
    if (i % 2 == 0) {
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

// The piece's rows of Q as a left operand; rows and columns beyond are 0.
template <typename Traits>
__device__ __forceinline__ OperandA<1, Traits::kHeadDim> load_queries(const DecodeParams& params,
                                                                      const DecodePiece& piece,
                                                                      int lane) {
  using Element = typename Traits::Element;
  OperandA<1, Traits::kHeadDim> Q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(half, lane);
    const Strides& strides = params.q_strides;
    const Element* source = static_cast<const Element*>(params.q) +
                            piece.batch_idx * strides.batch + piece.token(row) * strides.row +
                            piece.head(row) * strides.head + fragment_col(0, lane);
#pragma unroll
    for (int col = 0; col < Traits::kHeadDim; col += 8) {
      const bool valid = row < piece.num_rows && col < params.head_dim;
      Q.data[0][col / 16][col % 16 / 8 * 2 + half] =
          valid ? *reinterpret_cast<const uint32_t*>(source + col) : 0;
    }
  }
  return Q;
}

// This warp's share of the piece: O = P V normalised, and the softmax behind it.
template <typename Traits>
__device__ __forceinline__ void attend(typename Traits::Output& O, OnlineSoftmax<2>& softmax,
                                       DecodeStorage<Traits>& smem, const DecodeParams& params,
                                       const DecodePiece& piece) {
  using Element = typename Traits::Element;
  using KvTile = typename Traits::KvTile;
  constexpr int kStages = Traits::kStages, kKeys = Traits::kKeys;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  WarpLoader<Traits> cache(params, piece, warp, lane);
  const int piece_tiles = (piece.end_key - piece.first_key + kKeys - 1) / kKeys;
  const int num_tiles = (piece_tiles - warp + kDecodeWarps - 1) / kDecodeWarps;  // of this warp
  const auto stage = [&](int i) -> KvTile& {
    return smem.ring[warp][static_cast<unsigned>(i) % kStages];
  };
  // Load i is K(i / 2) or, if odd, V(i / 2). Each is a group, also those beyond the last tile, so
  // that the number of younger groups is the same at every wait.
  const auto load = [&](int i) {
    if (i / 2 < num_tiles)
      cache.load(stage(i), i, smem.valid[warp][static_cast<unsigned>(i) % kStages]);
    ptx::cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) load(i);

  const OperandA<1, Traits::kHeadDim> Q = load_queries<Traits>(params, piece, lane);
  const int last_row = piece.num_rows - 1;
  int row_first[2], row_end[2];  // the keys of the piece that this thread's rows see
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = piece.token(min(fragment_row(half, lane), last_row));
    row_first[half] = max(piece.window.first_key(token), piece.leftpad);
    row_end[half] = min(piece.window.end_key(token), piece.end_key);
  }

  for (int j = 0; j < num_tiles; ++j) {
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    const auto valid = cache.valid(smem.valid[warp][static_cast<unsigned>(2 * j) % kStages]);
    Accumulator<1, kKeys> S;
    S.fill(0.f);
    gemm_register<Element>(S, Q, SmemOperandB<KvTile, Layout::kKInner>(stage(2 * j), 0, lane));
    __syncwarp();  // all lanes have read the stage
    load(2 * j + kStages);

    const int first_key = piece.first_key + (warp + j * kDecodeWarps) * kKeys;
    // Later rows see later keys: row 1 has the last first key, row 0 the first end.
    if (__any_sync(~0u, first_key < row_first[1] || first_key + kKeys > row_end[0])) {
      const int tile_first[2] = {row_first[0] - first_key, row_first[1] - first_key};
      const int tile_end[2] = {row_end[0] - first_key, row_end[1] - first_key};
      mask_outside(S, tile_first, tile_end, lane);
    }
    mask_absent(S, valid, lane);
    float correction[2];
    if (softmax.step(S, correction)) scale_rows(O, correction);

    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    gemm_register<Element>(O, to_operand_a<Element>(S),
                           SmemOperandB<KvTile, Layout::kKOuter>(stage(2 * j + 1), 0, lane));
    __syncwarp();
    load(2 * j + 1 + kStages);
  }
  ptx::cp_async_wait<0>();
  softmax.finish();
  const float inverse_sum[2] = {softmax.inverse_sum(0), softmax.inverse_sum(1)};
  scale_rows(O, inverse_sum);
}

// Eight columns of one row: to the output, or as fp32 to the partial output.
template <typename Traits>
__device__ __forceinline__ void store_chunk(const DecodeParams& params, const DecodePiece& piece,
                                            int row, int col, const float (&o)[kChunk]) {
  using Element = typename Traits::Element;
  if (!piece.whole()) {
    float4* destination = reinterpret_cast<float4*>(
        params.partial.o + piece.row_index(params, row) * params.head_dim + col);
    destination[0] = {o[0], o[1], o[2], o[3]};
    destination[1] = {o[4], o[5], o[6], o[7]};
    return;
  }
  const Strides& strides = params.out_strides;
  Element* destination = static_cast<Element*>(params.out) + piece.batch_idx * strides.batch +
                         piece.token(row) * strides.row + piece.head(row) * strides.head + col;
  *reinterpret_cast<uint4*>(destination) = {
      ptx::pack<Element>(o[0], o[1]), ptx::pack<Element>(o[2], o[3]),
      ptx::pack<Element>(o[4], o[5]), ptx::pack<Element>(o[6], o[7])};
}

__device__ __forceinline__ void store_lse(const DecodeParams& params, const DecodePiece& piece,
                                          int row, float lse) {
  float* destination = piece.whole() ? params.lse : params.partial.lse;
  if (destination != nullptr) destination[piece.row_index(params, row)] = lse;
}

// Merges the warps' parts and stores the rows that exist.
template <typename Traits>
__device__ __forceinline__ void merge_warps(const DecodeStorage<Traits>& smem,
                                            const DecodeParams& params, const DecodePiece& piece) {
  constexpr int kChunks = Traits::kHeadDim / kChunk;
  for (int i = threadIdx.x; i < piece.num_rows * kChunks; i += Traits::kThreads) {
    const int row = i / kChunks, col = i % kChunks * kChunk;
    float max_lse = -INFINITY, sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kDecodeWarps; ++warp) {
      max_lse = fmaxf(max_lse, smem.warps.lse[warp][row]);
    }
    const float reference = merge_reference(max_lse);
#pragma unroll
    for (int warp = 0; warp < kDecodeWarps; ++warp) {
      sum += merge_weight(smem.warps.lse[warp][row], reference);
    }
    const float lse = merge_finish(reference, sum);
    if (col == 0) store_lse(params, piece, row, lse);
    if (col >= params.head_dim) continue;
    float o[kChunk] = {};
#pragma unroll
    for (int warp = 0; warp < kDecodeWarps; ++warp) {
      const float weight = merge_weight(smem.warps.lse[warp][row], lse);
#pragma unroll
      for (int c = 0; c < kChunk; ++c) o[c] += weight * smem.warps.o[warp][row][col + c];
    }
    store_chunk<Traits>(params, piece, row, col, o);
  }
}

// One piece, by the whole block.
template <typename Traits>
__device__ __forceinline__ void decode_piece(DecodeStorage<Traits>& smem,
                                             const DecodeParams& params, const DecodePiece& piece) {
  if (!piece.whole() && piece.first_key >= piece.end_key) {
    if (threadIdx.x < piece.num_rows) store_lse(params, piece, threadIdx.x, -INFINITY);
    return;
  }
  typename Traits::Output O;
  O.fill(0.f);
  OnlineSoftmax<2> softmax(params.softmax_scale);
  attend<Traits>(O, softmax, smem, params, piece);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();  // every warp is done with its ring
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(half, lane);
    if (row >= piece.num_rows) continue;
#pragma unroll
    for (int i = 0; i < O.kRowElements; i += 2) {
      *reinterpret_cast<float2*>(&smem.warps.o[warp][row][fragment_col(i, lane)]) = {
          O.at(half, i), O.at(half, i + 1)};
    }
    if (lane % 4 != 0) continue;
    smem.warps.lse[warp][row] = softmax.log_sum_exp(half);
    const float largest = softmax.largest_score(half);
    if (params.max_logits != nullptr && largest != -INFINITY) {
      raise_to(params.max_logits + piece.head(row), largest);
    }
  }
  __syncthreads();
  merge_warps<Traits>(smem, params, piece);
}

// kByLength: pieces from a line of them, one or a few a block (pieces.cuh).
template <typename Traits, bool kByLength>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) char smem_bytes[];
  DecodeStorage<Traits>& smem = *reinterpret_cast<DecodeStorage<Traits>*>(smem_bytes);
  // All blocks are resident or done when the combine kernel's blocks come, which then only wait.
  ptx::launch_dependents();
  const DecodeBlock block(params, blockIdx.x);
  if constexpr (kByLength) {
    const PieceLine line(params);
    const unsigned step = gridDim.x / DecodeBlock::blocks_per_piece(params);
#pragma unroll 1
    for (unsigned number = block.number;; number += step) {
      const PieceRange place = line.find(number);
      if (place.count == 0) return;
      decode_piece<Traits>(
          smem, params,
          DecodePiece::of_line<Traits::kKeys, Traits::kPaged>(params, block, line, number, place));
      __syncthreads();  // the piece is stored: its place is a ring again
    }
  } else {
    decode_piece<Traits>(smem, params,
                         DecodePiece::of_split<Traits::kKeys, Traits::kPaged>(params, block));
  }
}

template <DType kDType, int kHeadDim>
void launch_decode(const DecodeParams& params, Stream stream) {
  const auto run = [&]<bool kPaged, bool kByLength> {
    using Traits = DecodeTraits<kDType, kHeadDim, kPaged>;
    constexpr int kSmemBytes = sizeof(DecodeStorage<Traits>);
    static_assert(kSmemBytes <= 99 * 1024);
    const int64_t blocks = decode_row_tiles(params) / params.batch * decode_grid_pieces(params);
    launch<decode_kernel<Traits, kByLength>>(dim3(static_cast<unsigned>(blocks)), Traits::kThreads,
                                             kSmemBytes, stream, params);
  };
  const bool by_length = params.splits.keys > 0;
  if (params.block_table == nullptr) {
    by_length ? run.template operator()<false, true>() : run.template operator()<false, false>();
  } else if constexpr (kHeadDim <= kDecodePagedHeadDim) {
    by_length ? run.template operator()<true, true>() : run.template operator()<true, false>();
  }
}

}  // namespace flash_attn::cuda
