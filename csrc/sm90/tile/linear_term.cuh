// A term of the scores that grows by the same from a key to the next, as a product of its own: beside a
// busy tensor core an instruction for each score costs more than another 16 columns of Q and K.
#pragma once

#include <cuda/ptx>

#include "../../cuda/ptx/math.cuh"
#include "../ptx/wgmma.cuh"
#include "gemm.cuh"

namespace flash_attn::sm90 {

// S[i][j] += slope · j, for kN columns. The operands lie as 16 columns of Q and K would without a swizzle, in
// blocks of 8 × 8: those of K have j in each of their columns; those of Q are one block, of whose rows
// each holds the slope in three parts, which together have the bits of fp32. Where the first eight
// columns lie the second eight are read, too, so that the parts are those of half the slope.
template <typename Element, int kN, int kConsumers>
struct LinearTerm {
  // A number in both dtypes. With a steeper one S would lose too many of its bits beside the term.
  static constexpr float kLargestSlope = 64.f;

  alignas(128) Element columns[kN][8];
  Element slopes[kConsumers][8][8];

  // By all threads of the block, before a barrier among them.
  __device__ __forceinline__ void init(int thread, int num_threads) {
    for (int j = thread; j < kN; j += num_threads) {
      const uint32_t pair = flash_attn::ptx::pack<Element>(j, j);
      *reinterpret_cast<uint4*>(columns[j]) = {pair, pair, pair, pair};
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }

  // Of this consumer's next products. By all of its threads.
  __device__ __forceinline__ void set_slope(float slope, int consumer) {
    const float half = 0.5f * slope;
    const auto rounded = [](float x) {
      return flash_attn::ptx::unpack<Element>(flash_attn::ptx::pack<Element>(x, 0.f)).x;
    };
    const float first = rounded(half), second = rounded(half - first);
    if (threadIdx.x % 128 < 8) {
      *reinterpret_cast<uint4*>(slopes[consumer][threadIdx.x % 128]) = {
          flash_attn::ptx::pack<Element>(first, second),
          flash_attn::ptx::pack<Element>(half - first - second, 0.f), 0, 0};
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }

  // In the batch of the products of S, which come first.
  __device__ __forceinline__ void start(Accumulator<1, kN>& S, int consumer) const {
    ptx::Wgmma<Element, kN>::template ss<ptx::Major::kK, ptx::Major::kK>(
        S.data[0], descriptor(slopes[consumer], 0), descriptor(columns, sizeof(Element[8][8])), 1);
  }

 private:
  // stride: from a block of 8 rows to the next.
  __device__ __forceinline__ static uint64_t descriptor(const Element (*blocks)[8], int stride) {
    constexpr uint32_t kOwnMemory = 0x3ffff;
    return static_cast<uint64_t>(stride / 16) << 32 |
           (flash_attn::ptx::smem_address(blocks) & kOwnMemory) / 16;
  }
};

}  // namespace flash_attn::sm90
