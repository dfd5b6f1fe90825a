// Forward attention for Hopper: wgmma and TMA, loads and products in different warps.
//
//   O = softmax(softmax_scale · Q Kᵀ, masked) V        LSE = log Σ exp(…)
//
// A thread block stays on its multiprocessor and works through tiles: kBlockM queries of one head,
// whose keys it walks over in blocks of kBlockN, from the last to the first, so that the masked
// blocks of a causal row come first. Roles:
//
//   producer warpgroup    warp 0: takes tiles, loads K      consumer warpgroups    64 queries each:
//   (few registers)       warp 1: Q     warp 2: V           (many registers)       S, P, O in registers
//                         warp 3: what a score term needs: a bias, dropout's words of keys
//
// Each role runs ahead of the next as far as its ring has stages: while consumers finish a tile, K
// and V of the next one come in.
//
// The plain loop of a consumer:
//
//   for n:  S = Q K(n)ᵀ; score terms; mask; P, m, l = online_softmax(S); dropout
//           O = O · exp(m_old - m) + P V(n)
//
// The loop here (fwd_key_walk.cuh) departs from it in four ways. S = Q K(n)ᵀ is issued before O +=
// P V(n + 1), so that softmax(n) hides behind that product. Consumers take turns to issue, so that
// one's softmax also hides behind the others' products. The exponentials do not wait for the maxima
// of their own block (OnlineSoftmax::step_ahead): O is rescaled only where it must be. And a tile's
// first S is issued before the tile before ends: beside its last product, its epilogue and the way
// of its O out. (With two blocks on a multiprocessor, for few queries of d = 64, another block's
// products fill the gaps instead: KeyWalk::next_in_steps.)
//
//   consumer 0   │ issue Q K(n)ᵀ, P V(n+1) │ softmax(n)              │ issue Q K(n-1)ᵀ, P V(n) │ …
//   consumer 1   │ softmax(n+1)            │ issue Q K(n)ᵀ, P V(n+1) │ softmax(n)              │ …
//   products     │ consumer 0's            │ consumer 1's            │ consumer 0's            │ …
//
// It is compiled for several forms (FwdForm): without score terms, with all of them, with one of
// them (fwd_steps.cuh), without them for a piece of the keys, whose O and LSE are partial results,
// and in whose tiles heads may share rows (PackedHeads), and without them for a mask whose hidden
// tiles are passed over (fwd_masked_producer.cuh): there warp 0 takes tiles and finds their blocks
// of keys, and warp 3 loads K. Warp 3 loads K, too, where keys lie in pages, which forms without a
// bias and dropout read in place (fwd_pages.cuh).
//
// Shared memory   d <= 128   │ Q × 2 │ K × kStages │ V × kStages │ O             │ work, barriers │
//                 d > 128    │ Q     │ K × kStages │ V × kStages │ a part of O   │ work, barriers │
// With a staged bias, d = 128 has one place for Q, too.
#pragma once

#include "../cuda/launch.h"
#include "../cuda/ptx/griddepcontrol.cuh"
#include "fwd_key_walk.cuh"
#include "fwd_masked_producer.cuh"
#include "fwd_output.cuh"
#include "fwd_producer.cuh"
#include "fwd_tensor_maps.cuh"

namespace flash_attn::sm90 {

template <typename Traits>
__device__ __forceinline__ void consumer_loop(const typename Traits::Params& params,
                                              const CUtensorMap& out_map,
                                              FwdSharedStorage<Traits>& smem, int consumer) {
  FwdConsumer<Traits> self(params, out_map, smem, consumer);
  typename Traits::Scores S;
  self.start_tile(S);
  ptx::wgmma_wait<0>();
  pin(S);
#pragma unroll 1
  for (;;) {
    const int stage = self.work_ring.stage();
    if (smem.queue.stages[stage].end) break;
    const FwdWork& work = smem.queue.stages[stage].work();
    typename Traits::Output O;
    typename Traits::Softmax softmax(scale_of_scores<Traits>(params),
                                     Traits::ScorePolicy::kLeastMax);
    if constexpr (Traits::kMaxLogits) {
      if (work.has_keys()) {
        softmax.record().start(smem.score(stage).known(),
                               work.window.len_q() - work.first_row - self.warp_row, self.lane);
      }
    }
    O.fill(0.f);
    if (work.has_keys()) {
      KeyWalk<Traits>(work, smem.score(stage), self, S, O, softmax).run();
    } else {
      self.send_staged();
      if constexpr (Traits::kStartsEarly) self.start_next_tile(S);
    }
    if constexpr (Traits::kPieces) {
      store_piece<Traits>(work, self, O, softmax);
      self.release_work(stage);
    } else {
      stage_output<Traits>(work, self, O, softmax);
      if constexpr (Traits::kMaxLogits) {
        if (work.has_keys())
          softmax.record().publish(params.max_logits + work.q.head, smem.score(stage).known(),
                                   self.lane);
      }
      self.staged = stage;
    }
    if constexpr (!Traits::kStartsEarly) self.start_next_tile(S);
    ptx::wgmma_wait<0>();
    pin(S);
  }
  self.send_staged();
  ptx::bulk_wait_read();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks)
    fwd_kernel(const __grid_constant__ typename Traits::Params params,
               const __grid_constant__ typename Traits::Scheduler scheduler,
               const __grid_constant__ FwdTensorMaps<Traits::kBiasMaps> maps,
               const __grid_constant__ FwdTiles tiles) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<FwdSharedStorage<Traits>*>(dynamic_smem);
  const bool in_pages = maps.pages.rows > 0;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  if (threadIdx.x == 32) smem.init_barriers(in_pages);
  smem.zero_absent_slabs(params);
  if constexpr (Traits::kAlibi) smem.alibi.init(threadIdx.x, Traits::kThreads);
  // Else warp 0 comes to this barrier with its first tile (schedule_and_load_k_loop).
  if (Traits::kMasked || warp > 0) __syncthreads();
  // A mask's order of tiles may still be on its way, or what pieces are computed from.
  if constexpr (Traits::kMasked || Traits::kPieces) flash_attn::ptx::wait_for_prerequisites();
  if constexpr (Traits::kPieces) flash_attn::ptx::launch_dependents();

  if (warp < 4) {
    ptx::lower_registers<Traits::kProducerRegisters>();
    if (warp == 0) {
      if constexpr (Traits::kMasked) {
        schedule_and_find_keys_loop<Traits>(params, scheduler, tiles, smem);
      } else {
        if (Traits::kReadsPages && in_pages) {
          schedule_and_load_k_loop<Traits, Traits::kReadsPages>(params, scheduler, tiles, maps.k,
                                                                maps.pages.rows, smem);
        } else {
          schedule_and_load_k_loop<Traits, false>(params, scheduler, tiles, maps.k,
                                                  Traits::kKeyAlignment, smem);
        }
      }
    } else if ((Traits::kDropout || Traits::kKeyBias) && warp == 3) {
      if constexpr (Traits::kDropout) draw_key_words_loop<Traits>(params, smem);
      if constexpr (Traits::kKeyBias) load_key_bias_loop<Traits>(params, smem);
    } else if (Traits::kReadsPages && in_pages && warp > 1) {
      if constexpr (Traits::kReadsPages) {
        if (warp == 2) {
          load_pages_loop<Traits, false>(params, maps.v, maps.front.v, maps.pages,
                                         params.head_dim_v, smem.v, smem.v_ring, smem);
        } else {
          load_pages_loop<Traits, true>(params, maps.k, maps.front.k, maps.pages, params.head_dim,
                                        smem.k, smem.k_ring, smem);
        }
      }
    } else if (warp < (Traits::kStagedBias || Traits::kMasked ? 4 : 3) && ptx::elect_one()) {
      if (warp == 1) load_q_loop<Traits>(params, maps.q, smem);
      if constexpr (Traits::kMasked) {
        if (warp == 2) load_found_v_loop<Traits>(params, maps.v, smem);
        if (warp == 3) load_found_k_loop<Traits>(params, maps.k, smem);
      } else {
        if (warp == 2) load_v_loop<Traits>(params, maps.v, smem);
      }
      if constexpr (Traits::kStagedBias) {
        if (warp == 3) load_bias_loop<Traits>(params, maps, smem);
      }
    }
  } else {
    ptx::raise_registers<Traits::kConsumerRegisters>();
    consumer_loop<Traits>(params, maps.out, smem, warp / 4 - 1);
  }
}

// Whether the tiles of the call are those of a list: then the device knows how many they are.
template <typename Traits>
bool has_list(const typename Traits::Params& params) {
  if constexpr (Traits::kPieces) return params.list.exists();
  return false;
}

// Whether each sequence has as many tiles, so that nobody has to search for the sequence of one.
template <typename Traits>
bool has_places(const typename Traits::Params& params) {
  return packed_heads<Traits>(params).share() && !has_list<Traits>(params);
}

// Of varlen tensors there are rows in front of all sequences and behind them. Where sequences have
// places they come last.
template <typename Traits>
int ends_beside_sequences(const typename Traits::Params& params) {
  return has_places<Traits>(params) && params.cu_seqlens_q != nullptr ? 2 : 0;
}

// Tiles that read the same keys come side by side.
template <typename Traits>
typename Traits::Scheduler make_scheduler(const typename Traits::Params& params) {
  const PackedHeads packed = packed_heads<Traits>(params);
  const int tiles_of_group = packed.tiles(params.heads_q / params.heads_kv);
  const int heads = params.heads_kv * tiles_of_group;
  // Keys that the tiles under way at one time read: with a window, about as many as one tile sees.
  int64_t keys = params.seqlen_k;
  if (params.window_left >= 0 && params.window_right >= 0) {
    keys = std::min(keys, int64_t{params.window_left} + params.window_right + Traits::kBlockM);
  }
  const int64_t bytes = keys * (params.head_dim + params.head_dim_v) * 2 / tiles_of_group;
  if (has_places<Traits>(params)) {
    auto scheduler =
        Traits::Scheduler::make(nullptr, 0, packed.blocks(params.seqlen_q) * Traits::kBlockM,
                                params.batch + ends_beside_sequences<Traits>(params), heads, bytes);
    scheduler.section_heads = 1;
    return scheduler;
  }
  return Traits::Scheduler::make(params.cu_seqlens_q, params.total_q, params.seqlen_q, params.batch,
                                 heads, bytes);
}

template <typename Traits>
void launch_tiles(typename Traits::Params params, const cuda::DeviceInfo& device, Stream stream,
                  const MaskOrder& order = {}) {
  using Storage = FwdSharedStorage<Traits>;
  static_assert(Traits::kTile.blocks * (sizeof(Storage) + 1024) <= 228 * 1024);
  auto scheduler = make_scheduler<Traits>(params);
  // Tiles of one length need no counter.
  const bool alike = !Traits::kMasked && sequences_are_alike(params);
  // They come head after head, as no length has to come first: the thread blocks walk over the same
  // K and V together.
  if (alike) scheduler.section_heads = 1;
  if constexpr (Traits::kStagedBias) scheduler.share(params.score.bias);
  if constexpr (Traits::kMasked) scheduler.order = order;
  const int pieces = num_pieces<Traits>(params);
  const FwdTiles tiles = {.num_tiles = scheduler.num_tiles() * pieces,
                          .group = params.heads_q / params.heads_kv};
  if (tiles.num_tiles == 0) return;
  // Those beside the sequences have no keys, and take no time.
  const int long_tiles = tiles.num_tiles - ends_beside_sequences<Traits>(params) * scheduler.heads *
                                               scheduler.blocks_per_head * pieces;

  const bool listed = has_list<Traits>(params);
  const int resident = device.num_sms * Traits::kTile.blocks;
  const int blocks = listed ? resident : std::min(tiles.num_tiles, resident);
  const bool is_zeroed =
      listed || order.tiles != nullptr || (params.pages.entries != nullptr && !Traits::kPieces);
  if (alike || (long_tiles <= blocks && !listed)) {
    params.tile_counter = nullptr;
  } else if (!is_zeroed) {
    FLASH_ATTN_CUDA_CHECK(cudaMemsetAsync(params.tile_counter, 0, sizeof(int32_t), stream));
  }
  const auto maps = make_fwd_tensor_maps<Traits>(params);
  if constexpr (Traits::kMasked || Traits::kPieces) {
    bool overlap = order.tiles != nullptr;
    if constexpr (Traits::kPieces) overlap = !params.list.runs_beside;
    return cuda::launch_overlapping<fwd_kernel<Traits>>(
        blocks, Traits::kThreads, sizeof(Storage), overlap, stream, params, scheduler, maps, tiles);
  }
  cuda::launch<fwd_kernel<Traits>>(blocks, Traits::kThreads, sizeof(Storage), stream, params,
                                   scheduler, maps, tiles);
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  with_fwd_tile<kHeadDim, kHeadDimV>(
      params.seqlen_q, !sequences_are_alike(params), [&]<FwdTile kTile> {
        launch_tiles<FwdTraits<kDType, kHeadDim, kHeadDimV, kTile, FwdForm::kPlain>>(params, device,
                                                                                     stream);
      });
}

template <DType kDType, int kHeadDim>
void launch_fwd_with_scores(const FwdParams& params, const cuda::DeviceInfo& device,
                            Stream stream) {
  constexpr FwdTile kTile = kScoresTile<kHeadDim>;
  launch_tiles<FwdTraits<kDType, kHeadDim, kHeadDim, kTile, FwdForm::kScores>>(params, device,
                                                                               stream);
}

template <DType kDType, int kHeadDim>
void launch_fwd_with_one_term(const FwdParams& params, const cuda::DeviceInfo& device,
                              Stream stream) {
  constexpr FwdTile kTile = kFwdTile<kHeadDim, kHeadDim>;
  const auto launch = [&]<FwdForm kForm> {
    launch_tiles<FwdTraits<kDType, kHeadDim, kHeadDim, kTile, kForm>>(params, device, stream);
  };
  if (params.dropout.rng_state != nullptr) {
    launch.template operator()<FwdForm::kDropout>();
  } else if (params.score.alibi_slopes != nullptr) {
    launch.template operator()<FwdForm::kAlibi>();
  } else {
    launch.template operator()<FwdForm::kSoftcap>();
  }
}

template <DType kDType, int kHeadDim>
void launch_fwd_with_bias(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  const auto launch = [&]<FwdForm kForm, FwdTile kTile> {
    launch_tiles<FwdTraits<kDType, kHeadDim, kHeadDim, kTile, kForm>>(params, device, stream);
  };
  if (broadcasts_queries(params.score.bias)) {
    launch.template operator()<FwdForm::kKeyBias, kFwdTile<kHeadDim, kHeadDim>>();
  } else {
    launch.template operator()<FwdForm::kStagedBias, kStagedBiasTile<kHeadDim>>();
  }
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd_with_max_logits(const FwdParams& params, const cuda::DeviceInfo& device,
                                Stream stream) {
  constexpr FwdTile kTile = kFwdTile<kHeadDim, kHeadDimV>;
  launch_tiles<FwdTraits<kDType, kHeadDim, kHeadDimV, kTile, FwdForm::kMaxLogits>>(params, device,
                                                                                   stream);
}

template <DType kDType, int kHeadDim>
void launch_fwd_in_pieces(const FwdInPieces& params, const cuda::DeviceInfo& device,
                          Stream stream) {
  constexpr FwdTile kTile = kPiecesTile<kHeadDim>;
  launch_tiles<FwdTraits<kDType, kHeadDim, kHeadDim, kTile, FwdForm::kPieces>>(params, device,
                                                                               stream);
}

template <DType kDType, int kHeadDim>
void launch_fwd_masked(const Masked<FwdParams>& params, const MaskOrder& order,
                       const cuda::DeviceInfo& device, Stream stream) {
  constexpr FwdTile kTile = kMaskedTile<kHeadDim>;
  launch_tiles<FwdTraits<kDType, kHeadDim, kHeadDim, kTile, FwdForm::kMasked>>(params, device,
                                                                               stream, order);
}

}  // namespace flash_attn::sm90
