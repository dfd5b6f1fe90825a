// Split-KV decode: a few new tokens of each sequence against its long KV cache.
//
//   S = softmax_scale · Q Kᵀ → mask → softmax → O = P V, over one piece of the keys → (o, lse)
//
// The time is that of reading K and V once, so all is arranged to keep reads under way. A thread
// block takes one kv head of one sequence, up to 16 of the (token, query head) pairs that read it,
// and a piece of the keys (pieces.cuh). Its warps share nothing but that: warp w takes the tiles w,
// w + 4, … of the piece through a ring of shared-memory stages of its own, in which K and V tiles
// take turns, and has its own running softmax. No block barrier until the end, where the warps' (o,
// lse) are merged. One warp, one tile:
//
//   wait K(j)   S = Q K(j)ᵀ   refill K(j)'s stage   mask, softmax   wait V(j)   O += P V(j)   refill
//
// so that stages - 1 tiles of the warp are under way whenever it waits, and the memory does not see
// the arithmetic between.
//
// It serves every form of a cache of 16 bits. Calls that are not plain (core/params.h) have
// instances of their own, which rotate Q as they load it (decode_queries.cuh) and finish S before
// the mask (score_terms.cuh). Caches of 8 bits are served where they are dense and the call is
// plain; they are widened to fp16 between ldmatrix and mma (widened_gemm.cuh), and then Q and P are
// fp16, whatever q's dtype.
//
// Shared memory, 96 KiB (8 bits: 64), holds the rings in the loop and the warps' outputs in the
// end. Q, S, P and O are in registers.
#pragma once

#include <type_traits>

#include "../attn/mask.cuh"
#include "../attn/merge.cuh"
#include "../attn/online_softmax.cuh"
#include "../cache/absent_keys.cuh"
#include "../cache/loader.cuh"
#include "../launch.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../tile/gemm.cuh"
#include "config.h"
#include "decode_queries.cuh"
#include "output_row.cuh"
#include "pieces.cuh"
#include "score_terms.cuh"
#include "warp_loader.cuh"
#include "widened_gemm.cuh"

namespace flash_attn::cuda {

// kPlainCall: core/params.h says what a plain call is.
template <DType kCacheDTypeOfTile, int kHeadDimOfTile, bool kPagedCache, bool kPlainCall>
struct DecodeTraits {
  static constexpr DType kCacheDType = kCacheDTypeOfTile;
  static constexpr bool kPlain = kPlainCall;
  static constexpr bool k8Bit = is_8bit(kCacheDType);
  using Element = flash_attn::Element<k8Bit ? DType::kFp16 : kCacheDType>;  // of the products
  using Stored = std::conditional_t<k8Bit, uint8_t, Element>;
  static constexpr int kHeadDim = kHeadDimOfTile;
  static constexpr int kKeys = kDecodeTile<kHeadDim>.keys;
  static constexpr int kStages = k8Bit ? kDecode8BitStages : kDecodeTile<kHeadDim>.stages;
  static constexpr int kBlockKeys = kKeys * kDecodeWarps;
  static constexpr bool kPaged = kPagedCache;
  static constexpr int kElementBytes = sizeof(Stored);
  static constexpr int kTilesAhead = kHeadDim <= 128 ? 4 : 2;  // whose pages a warp looks up
  static constexpr int kThreads = 32 * kDecodeWarps;
  static constexpr int kBlocksPerSm = 2;
  using KvTile = SmemTile<Element, kKeys, k8Bit ? kHeadDim / 2 : kHeadDim>;
  using KeyBits = std::conditional_t<(kKeys > 32), uint64_t, uint32_t>;
  using Output = Accumulator<1, kHeadDim>;
  // Whether a bias is asked for a tile ahead (score_terms.cuh). Pages of the widest heads leave no
  // registers for it.
  static constexpr bool kBiasAhead = !kPlain && !(kPaged && kHeadDim > 192);
};

template <bool kPlain>
struct DecodeTerms {};
template <>
struct DecodeTerms<false> {
  DecodeRowTerms of_rows[kDecodeWarps][kDecodeRows];
};

template <typename Traits>
struct DecodeStorage {
  union {
    typename Traits::KvTile ring[kDecodeWarps][Traits::kStages];
    struct {
      // 8 floats more a row: the four rows that half a warp writes at once lie in different banks.
      // Of 8 bits it is two rows that a quarter writes, and 16 floats.
      float o[kDecodeWarps][kDecodeRows][Traits::kHeadDim + (Traits::k8Bit ? 16 : 8)];
      float lse[kDecodeWarps][kDecodeRows], inverse_sum[kDecodeWarps][kDecodeRows];
    } warps;
  };
  // Pages: one bit a key of the K tile in the stage.
  typename Traits::KeyBits valid[kDecodeWarps][Traits::kStages];
  [[no_unique_address]] DecodeTerms<Traits::kPlain> terms;
};

// S += Q Kᵀ for a tile.
template <typename Traits>
__device__ __forceinline__ void multiply_k(Accumulator<1, Traits::kKeys>& S,
                                           const OperandA<1, Traits::kHeadDim>& Q,
                                           const typename Traits::KvTile& K, int lane) {
  const SmemOperandB<typename Traits::KvTile, Layout::kKInner> view(K, 0, lane);
  if constexpr (Traits::k8Bit) {
    multiply_widened_keys<Traits::kCacheDType>(S, Q, view);
  } else {
    gemm_register<typename Traits::Element>(S, Q, view);
  }
}

// O += P V for a tile.
template <typename Traits>
__device__ __forceinline__ void multiply_v(typename Traits::Output& O,
                                           const OperandA<1, Traits::kKeys>& P,
                                           const typename Traits::KvTile& V, int lane) {
  if constexpr (Traits::k8Bit) {
    multiply_widened_values<Traits::kCacheDType>(O, P, V, lane);
  } else {
    gemm_register<typename Traits::Element>(
        O, P, SmemOperandB<typename Traits::KvTile, Layout::kKOuter>(V, 0, lane));
  }
}

// Terms leave scores in units of log 2, which is a scale of ln 2.
template <typename Traits>
__device__ __forceinline__ OnlineSoftmax<2> start_softmax(const DecodeParams& params) {
  if constexpr (Traits::kPlain) return OnlineSoftmax<2>(params.softmax_scale);
  return OnlineSoftmax<2>(kLn2, least_max(params.score));
}

// Computes O = P V over this warp's tiles of the piece, and the state of their softmax. Returns
// what is still to be multiplied with: the descale of V.
template <typename Traits>
__device__ __forceinline__ float attend(typename Traits::Output& O, OnlineSoftmax<2>& softmax,
                                        DecodeStorage<Traits>& smem, const DecodeParams& params,
                                        const DecodePiece& piece) {
  using Element = typename Traits::Element;
  using KvTile = typename Traits::KvTile;
  constexpr int kStages = Traits::kStages, kKeys = Traits::kKeys;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  WarpLoader<Traits> cache(params, piece, warp, lane);
  const int warp_first_key = piece.first_key + warp * kKeys;
  const int piece_tiles = (piece.end_key - piece.first_key + kKeys - 1) / kKeys;
  const auto of_this_warp = [&](int tiles) {
    return (tiles - warp + kDecodeWarps - 1) / kDecodeWarps;
  };
  const int num_tiles = of_this_warp(piece_tiles);
  const auto stage = [&](int i) -> KvTile& {
    return smem.ring[warp][static_cast<unsigned>(i) % kStages];
  };
  // The appended tokens are the cache's last; the tiles before them need not wait for the append.
  const int old_keys = piece.len_k - params.seqlen_new - piece.first_key;
  const int new_tile = params.seqlen_new > 0 ? of_this_warp(max(old_keys, 0) / kKeys) : num_tiles;
  // Load i is K(i / 2) or, if odd, V(i / 2). Each is a group, also those beyond the last tile, so
  // that the number of younger groups is the same at every wait.
  const auto load = [&](int i) {
    if (i / 2 < num_tiles) {
      if (i / 2 >= new_tile) ptx::wait_for_prerequisites();
      cache.load(stage(i), i, smem.valid[warp][static_cast<unsigned>(i) % kStages]);
    }
    ptx::cp_async_commit();
  };
  // Rotated queries pass through the last stage.
  constexpr int kLoadsBeforeQ = Traits::kPlain ? kStages : kStages - 1;
#pragma unroll
  for (int i = 0; i < kLoadsBeforeQ; ++i) load(i);

  const auto queries = [&] {
    if constexpr (!Traits::kPlain) {
      if (params.rotary_cos != nullptr)
        return load_rotated_queries<Traits>(smem.ring, params, piece);
    }
    return load_queries<Traits>(params, piece, lane);
  };
  OperandA<1, Traits::kHeadDim> Q = queries();
#pragma unroll
  for (int i = kLoadsBeforeQ; i < kStages; ++i) load(i);
  float row_scale[2], v_descale = 1.f;  // of 8 bits: what products are multiplied with
  if constexpr (Traits::k8Bit) {
    v_descale = descale_of(params.v_descale, params.v_descale_batch_stride,
                           params.v_descale_head_stride, piece.batch_idx, piece.kv_head);
    row_scale[0] = row_scale[1] =
        descale_of(params.k_descale, params.k_descale_batch_stride, params.k_descale_head_stride,
                   piece.batch_idx, piece.kv_head);
    if (params.dtype == DType::kBf16) bf16_to_fp16(Q, row_scale);
  }
  int row_first[2], row_end[2];  // the keys of the piece that this thread's rows see
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(fragment_row(half, lane), piece.num_rows - 1);
    const SequenceKeys seen = piece.seen_by(params, row);
    row_first[half] = seen.first;
    row_end[half] = min(seen.end, piece.end_key);
    if constexpr (!Traits::kPlain) {
      const int token = piece.token(row);
      const int head = piece.head(row, token);
      if (lane % 4 == 0) {  // read behind a barrier of the warp
        smem.terms.of_rows[warp][fragment_row(half, lane)].set(params, piece.batch_idx, piece.len_k,
                                                               token, head, 1.f);
      }
    }
  }
  // A tile's bias takes the registers of the last one's: it is asked for when that has been added.
  std::conditional_t<Traits::kBiasAhead, BiasAhead<Element, kKeys>, NoBiasAhead> bias;
  const auto ask_for_bias = [&](int j) {
    if constexpr (Traits::kBiasAhead) {
      if (j == num_tiles) return;
      bias.ask(params.score.bias, smem.terms.of_rows[warp], warp_first_key + j * Traits::kBlockKeys,
               lane);
    }
  };
  if (Traits::kBiasAhead && params.score.bias.data != nullptr) {
    __syncwarp();
    ask_for_bias(0);
  }

#pragma unroll 1
  for (int j = 0; j < num_tiles; ++j) {
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    const auto valid = cache.valid(smem.valid[warp][static_cast<unsigned>(2 * j) % kStages]);
    Accumulator<1, kKeys> S;
    S.fill(0.f);
    multiply_k<Traits>(S, Q, stage(2 * j), lane);
    __syncwarp();  // all lanes have read the stage
    load(2 * j + kStages);
    if constexpr (Traits::k8Bit) scale_rows(S, row_scale);

    const int first_key = warp_first_key + j * Traits::kBlockKeys;
    if constexpr (!Traits::kPlain) {
      finish_scores</*kWide=*/false, Element, /*kBias=*/true>(S, params, smem.terms.of_rows[warp],
                                                              first_key, lane, bias);
    }
    ask_for_bias(j + 1);
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
    multiply_v<Traits>(O, to_operand_a<Element>(S), stage(2 * j + 1), lane);
    __syncwarp();
    load(2 * j + 1 + kStages);
  }
  ptx::cp_async_wait<0>();
  softmax.finish();
  ptx::wait_for_prerequisites();  // whoever still reads the workspace, or the output's memory
  return v_descale;
}

// Merges the results of the warps and stores the rows that exist.
template <typename Traits>
__device__ __forceinline__ void merge_warps(const DecodeStorage<Traits>& smem,
                                            const DecodeParams& params, const DecodePiece& piece) {
  using Element = typename Traits::Element;
  constexpr int kChunks = Traits::kHeadDim / kChunk;
#pragma unroll 1
  for (int i = threadIdx.x; i < piece.num_rows * kChunks; i += Traits::kThreads) {
    const int row = i / kChunks, col = i % kChunks * kChunk;
    if (col >= params.head_dim_v) continue;
    float max_lse = -INFINITY, sum = 0.f, weight[kDecodeWarps];
#pragma unroll
    for (int warp = 0; warp < kDecodeWarps; ++warp) {
      weight[warp] = smem.warps.lse[warp][row];
      max_lse = fmaxf(max_lse, weight[warp]);
    }
    const float reference = merge_reference(max_lse);
#pragma unroll
    for (int warp = 0; warp < kDecodeWarps; ++warp) {
      weight[warp] = merge_weight(weight[warp], reference);
      sum += weight[warp];
    }
    const float inverse_sum = sum == 0.f ? 0.f : ptx::reciprocal(sum);
    float o[kChunk] = {};
#pragma unroll
    for (int warp = 0; warp < kDecodeWarps; ++warp) {
      const float factor = weight[warp] * inverse_sum * smem.warps.inverse_sum[warp][row];
#pragma unroll
      for (int c = 0; c < kChunk; ++c) o[c] += factor * smem.warps.o[warp][row][col + c];
    }
    const float lse = merge_finish(reference, sum);
    const int token = piece.token(row), head = piece.head(row, token);
    if (!piece.whole()) {
      const int64_t partial_row = workspace_row(params, piece.workspace_idx, head, token);
      if (col == 0) params.partial.lse[partial_row] = lse;
      auto* destination =
          reinterpret_cast<float4*>(params.partial.o + partial_row * params.head_dim_v + col);
      destination[0] = {o[0], o[1], o[2], o[3]};
      destination[1] = {o[4], o[5], o[6], o[7]};
      continue;
    }
    const OutputRow output(params, piece.batch_idx, head, token);
    const float factor = output.finish_lse(params, head, lse, col == 0);
#pragma unroll
    for (float& x : o) x *= factor;
    if (Traits::k8Bit && params.dtype == DType::kBf16) {
      store_chunk<__nv_bfloat16>(output.out + col, o);
    } else {
      store_chunk<Element>(output.out + col, o);
    }
  }
}

// Computes one piece. The whole thread block calls it.
template <typename Traits>
__device__ __forceinline__ void decode_piece(DecodeStorage<Traits>& smem,
                                             const DecodeParams& params, DecodePiece piece) {
  if (!piece.whole() && piece.first_key >= piece.end_key) {
    const int row = threadIdx.x;
    if (row >= piece.num_rows) return;
    const int token = piece.token(row);
    ptx::wait_for_prerequisites();
    params.partial.lse[workspace_row(params, piece.workspace_idx, piece.head(row, token), token)] =
        -INFINITY;
    return;
  }
  typename Traits::Output O;
  O.fill(0.f);
  auto softmax = start_softmax<Traits>(params);
  const float descale = attend<Traits>(O, softmax, smem, params, piece);
  // Which rows these are is found anew where the loop has no registers to keep it.
  if constexpr (Traits::kHeadDim > 128) piece.find_rows(params);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();  // every warp is done with its ring
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(half, lane);
    if (row >= piece.num_rows) continue;
    float (&o)[sizeof(smem.warps.o[0][0]) / sizeof(float)] = smem.warps.o[warp][row];
    if constexpr (Traits::k8Bit) {  // even columns and odd ones in blocks of their own
#pragma unroll
      for (int i = 0; i < O.kRowElements; i += 4) {
        *reinterpret_cast<float4*>(&o[i * 4 + lane % 4 * 4]) = {
            O.at(half, i), O.at(half, i + 2), O.at(half, i + 1), O.at(half, i + 3)};
      }
    } else {
#pragma unroll
      for (int i = 0; i < O.kRowElements; i += 2) {
        *reinterpret_cast<float2*>(&o[fragment_col(i, lane)]) = {O.at(half, i), O.at(half, i + 1)};
      }
    }
    if (lane % 4 != 0) continue;
    smem.warps.lse[warp][row] = softmax.log_sum_exp(half);
    // Nothing stays nothing, whatever the descale of a sequence without keys.
    const float inverse_sum = softmax.inverse_sum(half);
    smem.warps.inverse_sum[warp][row] =
        Traits::k8Bit && inverse_sum != 0.f ? inverse_sum * descale : inverse_sum;
    const float largest = softmax.largest_score(half);
    if (params.max_logits != nullptr && largest != -INFINITY) {
      raise_to(params.max_logits + piece.head(row, piece.token(row)), largest);
    }
  }
  __syncthreads();
  merge_warps<Traits>(smem, params, piece);
}

// With kByLength a block takes one or a few pieces from the line of all of them (pieces.cuh).
template <typename Traits, bool kByLength>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeParams params,
                  const __grid_constant__ DecodeGrid grid) {
  extern __shared__ __align__(128) char smem_bytes[];
  DecodeStorage<Traits>& smem = *reinterpret_cast<DecodeStorage<Traits>*>(smem_bytes);
  const DecodeBlock block(params, grid, blockIdx.x);
  // Lengths may be another kernel's results: neither this one nor the merge, whose blocks come when
  // all of these are resident or done, reads any before. Behind an append they are older than that.
  const bool masked = Traits::kPaged && kByLength && params.sequence_mask != nullptr;
  if (params.seqlen_new == 0 || masked) ptx::wait_for_prerequisites();
  ptx::launch_dependents();
  if constexpr (kByLength) {
    // With a mask each sequence has one piece, whose number is the sequence's.
    const auto is_left_out = [&](int number) {
      return Traits::kPaged && params.sequence_mask != nullptr && number < params.batch &&
             params.sequence_mask[number] == 0;  // not `masked`, which would take a register
    };
#pragma unroll 1
    for (int number = block.number;; number += grid.pieces) {
      if (is_left_out(number)) continue;
      const PieceLine line(params);  // anew for each piece, as registers are short
      const PieceRange range = line.find(number);
      if (range.count == 0) return;
      decode_piece<Traits>(smem, params,
                           DecodePiece::of_line<Traits::kKeys, Traits::kPaged>(
                               params, grid, block, line, number, range));
      __syncthreads();  // the piece is stored: its memory is a ring again
    }
  } else {
    decode_piece<Traits>(smem, params,
                         DecodePiece::of_split<Traits::kKeys, Traits::kPaged>(params, grid, block));
  }
}

template <DType kCacheDType, int kHeadDim, bool kPlain>
void launch_decode(const DecodeParams& params, Stream stream) {
  const DecodeGrid grid(params);
  const auto run = [&]<bool kPaged, bool kByLength> {
    using Traits = DecodeTraits<kCacheDType, kHeadDim, kPaged, kPlain>;
    constexpr int kSmemBytes = sizeof(DecodeStorage<Traits>);
    static_assert(kSmemBytes <= 99 * 1024);
    launch_overlapping<decode_kernel<Traits, kByLength>>(
        dim3(static_cast<unsigned>(grid.blocks(params))), Traits::kThreads, kSmemBytes,
        /*overlap=*/true, stream, params, grid);
  };
  const bool by_length = params.splits.keys > 0;
  if (params.block_table == nullptr) {
    by_length ? run.template operator()<false, true>() : run.template operator()<false, false>();
  } else if constexpr (!is_8bit(kCacheDType)) {
    by_length ? run.template operator()<true, true>() : run.template operator()<true, false>();
  }
}

}  // namespace flash_attn::cuda
