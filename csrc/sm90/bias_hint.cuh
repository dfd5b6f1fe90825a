// What the L2 cache is told of a bias that TMA reads.
#pragma once

#include "../core/params.h"
#include "ptx/tma.cuh"

namespace flash_attn::sm90 {

// Whoever shares a bias reads it a little later (SharedBiasScheduler). What is marked as read once
// may be gone by then, and memory sends it again.
__device__ __forceinline__ ptx::CacheHint bias_hint(const AttnParams& params,
                                                    const BiasParams& bias) {
  const bool is_shared =
      (bias.batch_stride == 0 && params.batch > 1) || (bias.head_stride == 0 && params.heads_q > 1);
  return is_shared ? ptx::CacheHint::kEvictNormal : ptx::CacheHint::kEvictFirst;
}

}  // namespace flash_attn::sm90
