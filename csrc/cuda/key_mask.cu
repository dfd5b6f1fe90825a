#include "key_mask.h"

#include "attn/seqlen.cuh"
#include "launch.h"

namespace flash_attn::cuda {
namespace {

constexpr int kThreads = 1024;

// A thread block reads a sequence's mask.
__global__ void __launch_bounds__(kThreads)
    find_hidden_kernel(const __grid_constant__ AttnParams params,
                       const __grid_constant__ BiasParams mask, int32_t* hidden, int32_t* seqused) {
  const int batch_idx = blockIdx.x;
  const SeqlenInfo seqlen(params, batch_idx);
  const auto* const seen = static_cast<const uint8_t*>(mask.data) + batch_idx * mask.batch_stride;
  const int keys = min(seqlen.len_k, mask.keys);
  bool hides = seqlen.len_k > mask.keys;
#pragma unroll 8
  for (int key = threadIdx.x; key < keys; key += kThreads) {
    hides |= seen[key * mask.key_stride] == 0;
  }
  hides = __syncthreads_or(hides) != 0;
  if (threadIdx.x != 0) return;
  const auto leftpad = static_cast<int>(seqlen.k_begin - seqlen.segment_k_begin);
  hidden[batch_idx] = hides;
  seqused[batch_idx] = hides ? 0 : leftpad + seqlen.len_k;
}

}  // namespace

void run_find_hidden(const AttnParams& params, const BiasParams& mask, int32_t* hidden,
                     int32_t* seqused, Stream stream) {
  if (params.batch == 0) return;
  launch<find_hidden_kernel>(params.batch, kThreads, 0, stream, params, mask, hidden, seqused);
}

}  // namespace flash_attn::cuda
