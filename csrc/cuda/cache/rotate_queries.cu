// Queries rotated to their positions in a cache, for the forward kernels: decode's own rotate them
// as they load them. One warp a token and head, a lane eight columns.
#include "rotate_queries.h"

#include "../dispatch.h"
#include "../launch.h"
#include "rotary.cuh"

namespace flash_attn::cuda {

namespace {

constexpr int kWarps = 4;

template <typename Element>
__global__ void __launch_bounds__(32 * kWarps)
    rotate_queries_kernel(const __grid_constant__ DecodeParams params, Element* rotated) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t token_index = row / params.heads_q;
  const int head = static_cast<int>(row % params.heads_q);
  const int token = static_cast<int>(token_index % params.seqlen_q);
  const int64_t batch = token_index / params.seqlen_q;
  if (batch >= params.batch) return;
  const int batch_idx = static_cast<int>(batch);
  const auto* source = query_row<Element>(params, batch_idx, token, head);
#pragma unroll 1
  for (int col = threadIdx.x % 32 * kChunk; col < params.head_dim; col += 32 * kChunk) {
    float x[kChunk];
    load_query_chunk(x, source, col, params, batch_idx, token);
    store_chunk<Element>(rotated + row * params.head_dim + col, x);
  }
}

}  // namespace

void run_rotate_queries(const DecodeParams& params, void* rotated, Stream stream) {
  const int64_t rows = static_cast<int64_t>(params.batch) * params.seqlen_q * params.heads_q;
  if (rows == 0) return;
  const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps));
  with_cache_dtype(params.dtype, [&]<DType kDType> {
    using Element = Element<kDType>;
    launch<rotate_queries_kernel<Element>>(grid, 32 * kWarps, 0, stream, params,
                                           static_cast<Element*>(rotated));
  });
}

}  // namespace flash_attn::cuda
