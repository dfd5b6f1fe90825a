// The gradient of the sinks: dsink = -Σ P_sink · delta over all rows of a head, P_sink = exp(sink -
// LSE).
//
// A sink is a key whose value is 0: its dP is 0, so its dS is P_sink · (0 - delta).
#include <cmath>

#include "attn/softmax_bwd.cuh"
#include "bwd_steps.h"
#include "launch.h"

namespace flash_attn::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  return value;
}

// One thread block sums a head: the same order, and so the same bits, every time.
__global__ void __launch_bounds__(kThreads)
    bwd_sink_kernel(const __grid_constant__ BwdParams params) {
  const int head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool varlen = params.cu_seqlens_q != nullptr;
  const int64_t rows = varlen ? params.total_q : params.seqlen_q;
  const int entries = varlen ? 1 : params.batch;
  const float sink = params.score.learnable_sink[head];
  float sum = 0.f;
  for (int entry = 0; entry < entries; ++entry) {
    const int64_t first = entry * params.lse_batch_stride + head * params.lse_head_stride;
    for (int64_t row = threadIdx.x; row < rows; row += kThreads) {
      const float lse = params.lse[first + row], delta = params.delta[first + row];
      // exp(sink - LSE) is infinite in a row that does not count, and anything in other rows
      // without a gradient.
      if (gives_gradient(lse)) sum = fmaf(-ptx::exp2((sink - lse) * kLog2E), delta, sum);
    }
  }
  __shared__ float sums[kWarps];
  sum = warp_sum(sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = warp_sum(sums[lane]);
    if (lane == 0) params.dsink[head] = sum;
  }
}

}  // namespace

void run_bwd_sink(const BwdParams& params, Stream stream) {
  static_assert(kWarps == 32);
  launch<bwd_sink_kernel>(params.heads_q, kThreads, 0, stream, params);
}

}  // namespace flash_attn::cuda
