// Caches of 8 bits on their way into the two matrix products of decode's readers.
//
// A 16-bit word of shared memory holds two neighbouring columns. K and V are widened to fp16,
// exactly, between ldmatrix and mma. What ldmatrix permutes so is undone in Q's columns and O's: of
// each 16, lane l has columns 4 (l % 4) … 4 (l % 4) + 3.
#pragma once

#include "../ptx/permute.cuh"
#include "../ptx/widen.cuh"
#include "../tile/gemm.cuh"

namespace flash_attn::cuda {

// Power of two that brings the largest of a row of Q near 2^14, where fp16 holds 11 bits of
// everything down to 2^-28 of it: more than bf16 has.
__device__ __forceinline__ float fp16_scale(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  const bool usual = exponent > -110 && exponent < 128;
  return usual ? __uint_as_float(static_cast<uint32_t>(127 + 14 - exponent) << 23) : 1.f;
}

// Widens four elements: the first two and the last two, or with kAlternate every second one.
template <DType kCacheDType, bool kAlternate>
__device__ __forceinline__ void widen(uint32_t bytes, uint32_t& low, uint32_t& high) {
  if constexpr (kCacheDType == DType::kInt8) {
    ptx::widen_int8<kAlternate>(bytes, low, high);
  } else {
    ptx::widen_e4m3(kAlternate ? ptx::permute_bytes(bytes, 0, 0x3120) : bytes, low, high);
  }
}

// S += Q Kᵀ of 16 keys from n on and 32 columns from k on, whose products go to two sums, which may
// be one. b: the words of K, as SmemOperandB loads them.
template <DType kCacheDType, int kKeys, typename Queries>
__device__ __forceinline__ void multiply_widened_keys(Accumulator<1, kKeys>& S0,
                                                      Accumulator<1, kKeys>& S1, const Queries& Q,
                                                      const uint32_t (&b)[4], int n, int k) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t q[1][4];
    Q.load(q, k + step * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t low, high;
      widen<kCacheDType, /*kAlternate=*/false>(b[2 * half + step], low, high);
      float (&c)[4] = (step == 0 ? S0 : S1).data[0][n / 8 + half];
      ptx::mma_m16n8k16<__half>(c, q[0], low, high, c);
    }
  }
}

// O += P V of 32 keys and 16 columns from n on, the even ones in the first block of 16 × 8 and the
// odd ones in the second. p0, p1: P of 16 keys each. b: the words of V, transposed, of eight keys
// each.
template <DType kCacheDType, int kHeadDim>
__device__ __forceinline__ void multiply_widened_values(Accumulator<1, kHeadDim>& O,
                                                        const uint32_t (&p0)[4],
                                                        const uint32_t (&p1)[4],
                                                        const uint32_t (&b)[4], int n) {
  uint32_t even[4], odd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    widen<kCacheDType, /*kAlternate=*/true>(b[i], even[i], odd[i]);
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint32_t (&p)[4] = step == 0 ? p0 : p1;
    float (&c0)[4] = O.data[0][n / 8], (&c1)[4] = O.data[0][n / 8 + 1];
    ptx::mma_m16n8k16<__half>(c0, p, even[2 * step], even[2 * step + 1], c0);
    ptx::mma_m16n8k16<__half>(c1, p, odd[2 * step], odd[2 * step + 1], c1);
  }
}

// S += Q Kᵀ for a tile, Q in registers.
template <DType kCacheDType, int kKeys, int kHeadDim, typename View>
__device__ __forceinline__ void multiply_widened_keys(Accumulator<1, kKeys>& S,
                                                      const OperandA<1, kHeadDim>& Q,
                                                      const View& K) {
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 32) {
#pragma unroll
    for (int n = 0; n < kKeys; n += 16) {
      uint32_t b[4];
      K.load(b, n, k / 2);
      multiply_widened_keys<kCacheDType>(S, S, Q, b, n, k);
    }
  }
}

// O += P V for a tile, P in registers.
template <DType kCacheDType, int kHeadDim, int kKeys, typename KvTile>
__device__ __forceinline__ void multiply_widened_values(Accumulator<1, kHeadDim>& O,
                                                        const OperandA<1, kKeys>& P,
                                                        const KvTile& V, int lane) {
  const uint32_t address = V.address(lane, 0);
#pragma unroll
  for (int key = 0; key < kKeys; key += 32) {
#pragma unroll
    for (int n = 0; n < kHeadDim; n += 16) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, KvTile::advance(address, key, n / 2));
      multiply_widened_values<kCacheDType>(O, P.data[0][key / 16], P.data[0][key / 16 + 1], b, n);
    }
  }
}

// Rows of Q in bf16 become fp16, each scaled by a power of two. What its products are to be
// multiplied with, row_scale, takes that back.
template <int kHeadDim>
__device__ __forceinline__ void bf16_to_fp16(OperandA<1, kHeadDim>& Q, float (&row_scale)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const auto for_each_pair = [&](const auto& f) {
#pragma unroll
      for (int block = 0; block < kHeadDim / 16; ++block) {
        f(Q.data[0][block][row]);
        f(Q.data[0][block][row + 2]);
      }
    };
    // Numbers that are not negative compare as their bits do.
    uint32_t pair = 0;
    for_each_pair([&](uint32_t x) { pair = __vmaxu2(pair, x & 0x7fff7fff); });
    const float2 two = ptx::unpack<__nv_bfloat16>(pair);
    float largest = fmaxf(two.x, two.y);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float scale = fp16_scale(largest);
    for_each_pair([&](uint32_t& x) {
      const float2 wide = ptx::unpack<__nv_bfloat16>(x);
      x = ptx::pack<__half>(wide.x * scale, wide.y * scale);
    });
    row_scale[row] *= __uint_as_float((254u << 23) - __float_as_uint(scale));  // 1 / scale
  }
}

}  // namespace flash_attn::cuda
