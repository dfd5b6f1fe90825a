// New keys and values into a cache, in place: rotate, quantise, write. One warp a token and head, a
// lane eight columns. A token without a place in the cache is dropped.
#include "append.h"

#include <cuda_fp8.h>

#include "../dispatch.h"
#include "../launch.h"
#include "../ptx/griddepcontrol.cuh"
#include "rotary.cuh"
#include "rows.cuh"

namespace flash_attn::cuda {

namespace {

constexpr int kWarps = 4;

// What a cache of 8 bits keeps of a value already divided by the descale. e4m3 saturates, NaN
// stays; int8 saturates, NaN becomes 0.
__device__ __forceinline__ uint8_t quantised(float x, DType cache_dtype) {
  if (cache_dtype == DType::kFp8E4M3) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  return static_cast<uint8_t>(__float2int_rn(fminf(fmaxf(isnan(x) ? 0.f : x, -128.f), 127.f)));
}

// Eight columns of one row of the cache, of which element `offset` is the first.
template <typename Element>
__device__ __forceinline__ void store_in_cache(const void* cache, int64_t offset, DType cache_dtype,
                                               const float (&x)[kChunk], float descale) {
  if (cache_dtype == DType::kFp8E4M3 || cache_dtype == DType::kInt8) {
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      words[i / 4] |= static_cast<uint32_t>(quantised(x[i] / descale, cache_dtype)) << i % 4 * 8;
    }
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(const_cast<void*>(cache)) + offset) = {
        words[0], words[1]};
    return;
  }
  store_chunk<Element>(static_cast<Element*>(const_cast<void*>(cache)) + offset, x);
}

template <typename Element>
__global__ void __launch_bounds__(32 * kWarps)
    append_kernel(const __grid_constant__ AppendParams params) {
  // Decode's blocks come now: what the cache holds already they may read at once, as this kernel
  // began when all before it was done.
  ptx::launch_dependents();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t token_index = index / params.heads_kv;
  const int head = static_cast<int>(index % params.heads_kv);
  const int token = static_cast<int>(token_index % params.seqlen_new);
  const int64_t batch = token_index / params.seqlen_new;
  if (batch >= params.batch) return;
  const int batch_idx = static_cast<int>(batch);
  const int64_t position = first_new_position(params, batch_idx) + token;
  if (position < 0 || position >= params.capacity) return;
  const CachePlace at = CacheSequence(params, batch_idx).place(params, static_cast<int>(position));
  if (at.page < 0) return;

  const auto source = [&](const void* tensor, const Strides& strides) {
    return static_cast<const Element*>(tensor) + batch * strides.batch + token * strides.row +
           head * strides.head;
  };
  const auto offset = [&](const Strides& strides, int col) {
    return at.page * strides.batch + at.row * strides.row + head * strides.head + col;
  };
  float x[kChunk];
  const int first_col = threadIdx.x % 32 * kChunk,
            end_col = max(params.head_dim, params.head_dim_v);
#pragma unroll 1
  for (int col = first_col; col < end_col; col += 32 * kChunk) {
    if (col < params.head_dim) {
      const Element* row = source(params.k, params.k_new_strides);
      load_chunk<Element>(x, row + col);
      if (params.rotary_cos != nullptr && col < params.rotary_dim) {
        rotate_chunk(x, row, col, position, params);
      }
      store_in_cache<Element>(params.k_cache, offset(params.k_strides, col), params.cache_dtype, x,
                              descale_of(params.k_descale, params.k_descale_batch_stride,
                                         params.k_descale_head_stride, batch_idx, head));
    }
    if (col < params.head_dim_v) {
      load_chunk<Element>(x, source(params.v, params.v_new_strides) + col);
      store_in_cache<Element>(params.v_cache, offset(params.v_strides, col), params.cache_dtype, x,
                              descale_of(params.v_descale, params.v_descale_batch_stride,
                                         params.v_descale_head_stride, batch_idx, head));
    }
  }
}

}  // namespace

void run_append(const AppendParams& params, Stream stream) {
  const int64_t rows = static_cast<int64_t>(params.batch) * params.seqlen_new * params.heads_kv;
  if (rows == 0) return;
  const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps));
  with_cache_dtype(params.dtype, [&]<DType kDType> {
    launch<append_kernel<Element<kDType>>>(grid, 32 * kWarps, 0, stream, params);
  });
}

}  // namespace flash_attn::cuda
