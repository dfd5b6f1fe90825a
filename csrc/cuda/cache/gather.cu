// The keys of a paged cache side by side, for the forward kernels, which read neighbouring rows.
// Only keys that some query sees are copied: by length, leftpad and window. With many queries the
// copy, twice the bytes that count, is little beside the attention.
//
// Lengths are on the device. Sequence b begins where those before it end, which every block finds
// for itself by their sum. A forward kernel cannot pass over single keys: a sequence of which a
// page is missing, or that the room does not hold, is marked and gets no keys here.
#include "gather.h"

#include <algorithm>

#include "../launch.h"
#include "../tile/element.cuh"
#include "rows.cuh"
#include "sequence_keys.cuh"

namespace flash_attn::cuda {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kKeys = 16;  // of a block's step: few, so that short calls have many blocks

// Returns the sum of all threads' x.
__device__ __forceinline__ int64_t sum_of_block(int64_t x) {
  __shared__ int64_t partial[kWarps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(~0u, x, distance);
  }
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  int64_t sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp];
  return sum;
}

// Says whether all keys have a place. All threads call it.
__device__ __forceinline__ bool is_whole(const DecodeParams& params, const CacheSequence& sequence,
                                         const SequenceKeys& keys) {
  const int first_page = keys.first / params.page_size * params.page_size;
  bool whole = true;
  for (int64_t key = first_page + int64_t{threadIdx.x} * params.page_size; key < keys.end;
       key += int64_t{kThreads} * params.page_size) {
    whole &= sequence.place(params, static_cast<int>(key)).page >= 0;
  }
  return __syncthreads_and(whole) != 0;
}

// Copies rows of K or V, in words of 16 bits: a warp has two of them under way, 1 KiB of each.
// `places` says where they lie in the cache; page -1 means nowhere.
__device__ __forceinline__ void copy_rows(const void* cache, const Strides& strides, int heads,
                                          int head_dim, const CachePlace (&places)[kKeys],
                                          int num_keys, void* packed, int64_t first_row) {
  constexpr int kWarpKeys = kKeys / kWarps, kAtOnce = 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head_chunks = head_dim / kChunk, chunks = heads * head_chunks;
  const auto* source = static_cast<const uint16_t*>(cache);
  uint4* target = static_cast<uint4*>(packed) + first_row * chunks;
  for (int first_chunk = lane; first_chunk < chunks; first_chunk += 32 * kAtOnce) {
    uint4 data[kAtOnce][kWarpKeys];
    const auto for_each = [&](const auto& step) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int chunk = first_chunk + 32 * i;
        if (chunk >= chunks) break;
#pragma unroll
        for (int j = 0; j < kWarpKeys; ++j) {
          const int key = warp + j * kWarps;
          if (key < num_keys && places[key].page >= 0) step(data[i][j], chunk, key);
        }
      }
    };
    for_each([&](uint4& x, int chunk, int key) {
      const int head = chunk / head_chunks, col = (chunk - head * head_chunks) * kChunk;
      x = *reinterpret_cast<const uint4*>(source + places[key].page * strides.batch +
                                          places[key].row * strides.row + head * strides.head +
                                          col);
    });
    for_each([&](uint4& x, int chunk, int key) { target[int64_t{key} * chunks + chunk] = x; });
  }
}

// Grid (batch, any, K and V): the blocks of a sequence take its keys in turns.
__global__ void __launch_bounds__(kThreads)
    gather_pages_kernel(const __grid_constant__ DecodeParams params,
                        const __grid_constant__ PackedCache packed) {
  __shared__ CachePlace places[kKeys];
  const int batch_idx = blockIdx.x;
  const SequenceKeys keys(params, batch_idx);
  const int num_keys = keys.end - keys.first;
  if (blockIdx.y > 0 && int64_t{blockIdx.y} * kKeys >= num_keys) return;

  int64_t before = 0;
  for (int other = threadIdx.x; other < batch_idx; other += kThreads) {
    const SequenceKeys theirs(params, other);
    before += theirs.end - theirs.first;
  }
  const int64_t start = sum_of_block(before);
  const bool fits = start + num_keys <= packed.rows;
  const CacheSequence sequence(params, batch_idx);
  if (blockIdx.y == 0 && blockIdx.z == 0) {
    const bool whole = is_whole(params, sequence, keys) && fits;
    if (threadIdx.x == 0) {
      const auto end = [&](int64_t row) { return static_cast<int32_t>(min(row, packed.rows)); };
      packed.cu_seqlens[batch_idx] = end(start);
      if (batch_idx + 1 == params.batch) packed.cu_seqlens[params.batch] = end(start + num_keys);
      packed.seqused[batch_idx] = whole ? num_keys : 0;
      packed.missed[batch_idx] = !whole;
    }
  }
  if (!fits) return;

  for (int64_t from = int64_t{blockIdx.y} * kKeys; from < num_keys;
       from += int64_t{gridDim.y} * kKeys) {
    const int count = static_cast<int>(min(num_keys - from, int64_t{kKeys}));
    if (threadIdx.x < count) {
      places[threadIdx.x] =
          sequence.place(params, static_cast<int>(keys.first + from) + threadIdx.x);
    }
    __syncthreads();
    if (blockIdx.z == 0) {
      copy_rows(params.k_cache, params.k_strides, params.heads_kv, params.head_dim, places, count,
                packed.k, start + from);
    } else {
      copy_rows(params.v_cache, params.v_strides, params.heads_kv, params.head_dim_v, places, count,
                packed.v, start + from);
    }
    __syncthreads();  // all are done with the places
  }
}

// Two words of 16 bits are one of fp32.
DecodeParams in_words(DecodeParams params) {
  if (params.cache_dtype != DType::kFp32) return params;
  for (Strides* strides : {&params.k_strides, &params.v_strides}) {
    strides->batch *= 2;
    strides->row *= 2;
    strides->head *= 2;
  }
  params.head_dim *= 2;
  params.head_dim_v *= 2;
  return params;
}

}  // namespace

void run_gather_pages(const DecodeParams& params, const PackedCache& packed,
                      const DeviceInfo& device, Stream stream) {
  // A few blocks a multiprocessor read at full speed; a table has room for far more keys than
  // count.
  constexpr int kBlocksPerSm = 4;
  const int steps = (params.capacity + kKeys - 1) / kKeys;
  const int blocks = std::max(kBlocksPerSm * device.num_sms / params.batch, 1);
  launch<gather_pages_kernel>(dim3(params.batch, std::max(std::min(steps, blocks), 1), 2), kThreads,
                              0, stream, in_words(params), packed);
}

}  // namespace flash_attn::cuda
