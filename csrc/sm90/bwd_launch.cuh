// Launches of the backward kernel for head dims up to kBwdMaxSingleHeadDim, by form.
#pragma once

#include <algorithm>

#include "../cuda/launch.h"
#include "bwd.cuh"
#include "bwd.h"

namespace flash_attn::sm90 {

template <typename Traits>
void launch_bwd_kernel(typename Traits::Params params, const cuda::DeviceInfo& device,
                       Stream stream, const MaskOrder& order = {}) {
  using Storage = BwdSharedStorage<Traits>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  auto scheduler = make_bwd_scheduler<typename Traits::Scheduler>(params, device.num_sms,
                                                                  Traits::kTile.group_first_first);
  if constexpr (Traits::kMasked) scheduler.order = order;
  const int num_tiles = scheduler.num_tiles();
  const int blocks = std::min(num_tiles * params.splits.count, device.num_sms);
  if (num_tiles == 0) return;
  BwdTermMaps<Traits::kAdditive> maps = {
      make_bwd_tensor_maps(params, Traits::kBlockM, Traits::kBlockN, Traits::QTile::kSlabCols)};
  if constexpr (Traits::kAdditive) {
    if (params.score.bias.data != nullptr && !broadcasts_queries(params.score.bias)) {
      maps.bias = make_bias_map(params, Traits::BiasTile::kSlabCols, Traits::BiasTile::kRows);
      scheduler.share(params.score.bias);
    }
    if (can_stage_bias_gradient(params)) {
      maps.dbias =
          make_bias_gradient_map(params, Traits::BiasTile::kSlabCols, Traits::BiasTile::kRows);
    } else {
      params.dbias.form = BiasGradientParams::Form::kNone;  // computed elsewhere
    }
  }
  if constexpr (Traits::kPools) {
    maps.dq = make_dq_map(params, Traits::BandSlab::kCols, Traits::kBandRows);
  }
  // Tiles of one length need no counter, unless they wait for each other.
  const bool counts = Traits::kOrders || Traits::kPools;
  if (sequences_are_alike(params) && !counts) params.tile_counter = nullptr;
  cuda::launch_overlapping<bwd_kernel<Traits>>(blocks, Traits::kThreads, sizeof(Storage), true,
                                               stream, params, scheduler, maps, num_tiles);
}

// Whether calls with a pool and long heads have a form of their own.
template <DType kDType, int kHeadDim>
inline constexpr bool kHasLongPool =
    kDType == DType::kBf16 && kBwdTile<kHeadDim>.folds_rows && kBwdTile<kHeadDim>.block_m == 128;
inline bool has_long_heads(const BwdParams& params) {
  const int group = params.heads_q / params.heads_kv;
  return params.total_q >= int64_t{kBwdLongPooledQueries} * group * params.batch;
}

template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  if constexpr (kBwdTile<kHeadDim>.pool_rounds > 0) {
    if constexpr (kBwdTile<kHeadDim>.pools_stretches) {
      if (params.dq_pool.stretches > 1) {
        return launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kStretched>>(params, device,
                                                                                   stream);
      }
    }
    if constexpr (kBwdTile<kHeadDim>.queries_pooled_in_order > 0) {
      if (params.dq_pool.places > 0 && params.dq_turns != nullptr) {
        using Traits = BwdTraits<kDType, kHeadDim, BwdForm::kPooledInOrder>;
        return launch_bwd_kernel<Traits>(params, device, stream);
      }
    }
    if (params.dq_pool.places > 0) {
      if constexpr (kHasLongPool<kDType, kHeadDim>) {
        if (has_long_heads(params)) {
          using Traits = BwdTraits<kDType, kHeadDim, BwdForm::kPooledLong>;
          return launch_bwd_kernel<Traits>(params, device, stream);
        }
      }
      return launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kPooled>>(params, device,
                                                                              stream);
    }
  }
  if (params.dq_turns != nullptr) {
    launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kOrdered>>(params, device, stream);
  } else {
    launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kPlain>>(params, device, stream);
  }
}

template <DType kDType, int kHeadDim>
void launch_bwd_split(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kSplit>>(params, device, stream);
}

template <DType kDType, int kHeadDim>
void launch_bwd_masked(const Masked<BwdParams>& params, const MaskOrder& order,
                       const cuda::DeviceInfo& device, Stream stream) {
  launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kMasked>>(params, device, stream, order);
}

template <DType kDType, int kHeadDim>
void launch_bwd_with_scores(const BwdParams& params, const cuda::DeviceInfo& device,
                            Stream stream) {
  launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kScores>>(params, device, stream);
}

template <DType kDType, int kHeadDim>
void launch_bwd_with_some_terms(const BwdParams& params, const cuda::DeviceInfo& device,
                                Stream stream) {
  if (params.score.softcap != 0) {
    launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kSoftcap>>(params, device, stream);
  } else if (params.dropout.rng_state != nullptr) {
    launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kDropout>>(params, device, stream);
  } else {
    launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kAdditive>>(params, device, stream);
  }
}

}  // namespace flash_attn::sm90
