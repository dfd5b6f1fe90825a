#include "key_mask.h"

#include <algorithm>

#include "attn/block_range.cuh"
#include "attn/pages.cuh"
#include "attn/seqlen.cuh"
#include "launch.h"
#include "ptx/griddepcontrol.cuh"

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

// A thread block reads a sequence's row of the table, as far as its queries see keys.
__global__ void __launch_bounds__(kThreads)
    find_missing_pages_kernel(const __grid_constant__ FwdParams params, int32_t* hidden,
                              int32_t* seqused, int32_t* tile_counter) {
  ptx::launch_dependents();
  const int batch_idx = blockIdx.x;
  if (batch_idx == 0 && threadIdx.x == 0) *tile_counter = 0;
  if (batch_idx == params.batch) return;  // there is none
  const SeqlenInfo seqlen(params, batch_idx);
  const AttentionWindow window(params, seqlen.len_q, seqlen.len_k);
  const int end_key = seqlen.len_q > 0 ? window.end_key(seqlen.len_q - 1) : 0;
  const int32_t* const entries =
      entries_of_row(params.pages, SeqlenInfo::kv_row(params, batch_idx));
  bool lacks = false;
  const int page_size = params.pages.page_size;
  const int first_page = window.first_key(0) / page_size;
  for (int64_t key = int64_t{first_page + static_cast<int>(threadIdx.x)} * page_size; key < end_key;
       key += int64_t{kThreads} * page_size) {
    lacks |= page_of_key(params.pages, entries, static_cast<int>(key)) < 0;
  }
  lacks = __syncthreads_or(lacks) != 0;
  if (threadIdx.x != 0) return;
  hidden[batch_idx] = lacks;
  seqused[batch_idx] = lacks ? 0 : seqlen.len_k;
}

__device__ __forceinline__ void clear(char* page, int64_t bytes) {
  const bool in_chunks = (reinterpret_cast<uintptr_t>(page) | bytes) % sizeof(uint4) == 0;
  const int64_t chunks = in_chunks ? bytes / static_cast<int64_t>(sizeof(uint4)) : 0;
  for (int64_t i = threadIdx.x; i < chunks; i += kThreads) reinterpret_cast<uint4*>(page)[i] = {};
  if (in_chunks) return;
  for (int64_t i = threadIdx.x; i < bytes; i += kThreads) page[i] = 0;
}

// A thread block looks at a page.
__global__ void __launch_bounds__(kThreads)
    clear_pages_kernel(char* k, int64_t k_page_bytes, char* v, int64_t v_page_bytes,
                       const bool* missing) {
  const int64_t page = blockIdx.x;
  if (!missing[page]) return;
  clear(k + page * k_page_bytes, k_page_bytes);
  clear(v + page * v_page_bytes, v_page_bytes);
}

}  // namespace

void run_clear_pages(void* k, int64_t k_page_bytes, void* v, int64_t v_page_bytes,
                     const bool* missing, int64_t pages, Stream stream) {
  if (pages == 0) return;
  launch<clear_pages_kernel>(static_cast<unsigned>(pages), kThreads, 0, stream,
                             static_cast<char*>(k), k_page_bytes, static_cast<char*>(v),
                             v_page_bytes, missing);
}

void run_find_missing_pages(const FwdParams& params, int32_t* hidden, int32_t* seqused,
                            int32_t* tile_counter, Stream stream) {
  launch<find_missing_pages_kernel>(std::max(params.batch, 1), kThreads, 0, stream, params, hidden,
                                    seqused, tile_counter);
}

void run_find_hidden(const AttnParams& params, const BiasParams& mask, int32_t* hidden,
                     int32_t* seqused, Stream stream) {
  if (params.batch == 0) return;
  launch<find_hidden_kernel>(params.batch, kThreads, 0, stream, params, mask, hidden, seqused);
}

}  // namespace flash_attn::cuda
