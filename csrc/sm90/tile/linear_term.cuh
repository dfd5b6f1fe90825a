// A term of the scores that grows by the same from a key to the next, as a product of its own: beside a
// busy tensor core an instruction for each score costs more than another 16 columns of Q and K.
#pragma once

#include <cuda/ptx>

#include "../../cuda/ptx/math.cuh"
#include "../ptx/wgmma.cuh"
#include "gemm.cuh"

namespace flash_attn::sm90 {

// S[i][j] += slope · j, for kN columns. Q's 16 columns are the slope in three parts, which together have the
// bits of fp32, and zeros; they lie in registers. Those of K lie as K would without a swizzle, in
// blocks of 8 × 8, and have j in each; the second eight columns are the first eight once more.
template <typename Element, int kN>
struct LinearTerm {
  // A number in both dtypes. With a steeper one S would lose too many of its bits beside the term.
  static constexpr float kLargestSlope = 64.f;
  using Slope = OperandA<1, 16>;

  alignas(128) Element columns[kN][8];

  // By all threads of the block, before a barrier among them.
  __device__ __forceinline__ void init(int thread, int num_threads) {
    for (int j = thread; j < kN; j += num_threads) {
      const uint32_t pair = flash_attn::ptx::pack<Element>(j, j);
      *reinterpret_cast<uint4*>(columns[j]) = {pair, pair, pair, pair};
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }

  // The same in all rows.
  __device__ __forceinline__ static Slope parts_of(float slope, int lane) {
    const auto rounded = [](float x) {
      return flash_attn::ptx::unpack<Element>(flash_attn::ptx::pack<Element>(x, 0.f)).x;
    };
    const float first = rounded(slope), second = rounded(slope - first);
    const uint32_t first_two = flash_attn::ptx::pack<Element>(first, second);
    const uint32_t third = flash_attn::ptx::pack<Element>(slope - first - second, 0.f);
    const uint32_t of_lane = lane % 4 == 0 ? first_two : lane % 4 == 1 ? third : 0;
    return {{{{of_lane, of_lane, 0, 0}}}};
  }

  // In the batch of the products of S, which come first; their fence is that of `slope`, too.
  __device__ __forceinline__ void start(Accumulator<1, kN>& S, const Slope& slope) const {
    constexpr uint32_t kOwnMemory = 0x3ffff;
    constexpr uint64_t kNextBlock = sizeof(Element[8][8]) / 16;  // of 8 rows
    const uint64_t descriptor =
        kNextBlock << 32 | (flash_attn::ptx::smem_address(columns) & kOwnMemory) / 16;
    ptx::Wgmma<Element, kN>::template rs<ptx::Major::kK>(S.data[0], slope.data[0][0], descriptor,
                                                         1);
  }
};

}  // namespace flash_attn::sm90
