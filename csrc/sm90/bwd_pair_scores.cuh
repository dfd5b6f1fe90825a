// P on its way from the warpgroup that computes it to the one that computes dS, through shared
// memory.
#pragma once

#include "../cuda/ptx/ldmatrix.cuh"
#include "../cuda/ptx/permute.cuh"
#include "bwd_scores.cuh"
#include "ptx/stmatrix.cuh"

namespace flash_attn::sm90 {

// Two numbers kExactScale · P as fp16. They serve a dS in bf16, as they have three bits more than
// it keeps.
struct HalfScores {
  __device__ __forceinline__ static uint32_t pack(float low, float high) {
    return flash_attn::ptx::pack<__half>(low, high);
  }
  __device__ __forceinline__ static float2 unpack(uint32_t packed) {
    return flash_attn::ptx::unpack<__half>(packed);
  }
};

// They serve a dS in fp16, where HalfScores would be as coarse as the rounding of dS itself. P has
// no sign and is at most 1 but for its own errors, so here the sign's bit belongs to the mantissa.
// What is kept are bits of a float that is made so small that the upper bits of its exponent are 0;
// P from 8 on would lose such bits. A NaN becomes a number. But where P is NaN, so are the row's O
// and delta, and with delta dS.
struct UnsignedHalfScores {
  static constexpr float kDown = 0x1p-111f, kUp = 0x1p111f;
  static constexpr int kFirstBit = 12;  // of a float's bits that are kept
  static constexpr uint32_t kKept = 0xffffu << kFirstBit;

  // If they were shifted up, to the upper half of a register, ptxas of CUDA 13.0 would take the
  // bits for 0.
  __device__ __forceinline__ static uint32_t pack(float low, float high) {
    constexpr uint32_t kLowerHalves = 0x5410;
    return flash_attn::ptx::permute_bytes(rounded(low) >> kFirstBit, rounded(high) >> kFirstBit,
                                          kLowerHalves);
  }
  __device__ __forceinline__ static float2 unpack(uint32_t packed) {
    return {__uint_as_float(packed << kFirstBit & kKept) * kUp,
            __uint_as_float(packed >> (16 - kFirstBit) & kKept) * kUp};
  }

 private:
  // Rounds to the bits that are kept.
  __device__ __forceinline__ static uint32_t rounded(float x) {
    return __float_as_uint(x * kDown) + (1u << (kFirstBit - 1));
  }
};

// Stores P, which is kExactScale times the probabilities. first_row: the first of the warp's rows
// in the tile.
template <typename Exact, typename Tile, int kBlockM>
__device__ __forceinline__ void store_exact(Tile& tile, const Accumulator<1, kBlockM>& P,
                                            int first_row, int lane) {
  const uint32_t address = tile.address(first_row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int col = 0; col < kBlockM; col += 16) {
    const float (&left)[4] = P.data[0][col / 8];
    const float (&right)[4] = P.data[0][col / 8 + 1];
    ptx::stmatrix_x4(Tile::advance(address, 0, col),
                     {Exact::pack(left[0], left[1]), Exact::pack(left[2], left[3]),
                      Exact::pack(right[0], right[1]), Exact::pack(right[2], right[3])});
  }
}

// Puts dS = P ∘ (dP - delta) in place of dP, from P as store_exact() left it, and from
// delta / kExactScale. first_row: the first of the warp's rows in the tile.
template <typename Exact, typename Tile, int kBlockM>
__device__ __forceinline__ void differentiate(Accumulator<1, kBlockM>& dP, const Tile& P,
                                              int first_row, const float (&delta)[kBlockM],
                                              int lane) {
  const uint32_t address = P.address(first_row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int col = 0; col < kBlockM; col += 16) {
    uint32_t p_pairs[4];
    flash_attn::ptx::ldmatrix_x4(p_pairs, Tile::advance(address, 0, col));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(delta + col + n * 8 + lane % 4 * 2);
      float (&dp)[4] = dP.data[0][col / 8 + n];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float2 p = Exact::unpack(p_pairs[2 * n + row]);
        dp[2 * row] = p.x * fmaf(dp[2 * row], 1 / kExactScale, -pair.x);
        dp[2 * row + 1] = p.y * fmaf(dp[2 * row + 1], 1 / kExactScale, -pair.y);
      }
    }
  }
}

// The same where delta has been subtracted from dP already.
template <typename Exact, typename Tile, int kBlockM>
__device__ __forceinline__ void differentiate(Accumulator<1, kBlockM>& dP, const Tile& P,
                                              int first_row, int lane) {
  const uint32_t address = P.address(first_row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int col = 0; col < kBlockM; col += 16) {
    uint32_t p_pairs[4];
    flash_attn::ptx::ldmatrix_x4(p_pairs, Tile::advance(address, 0, col));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 p = Exact::unpack(p_pairs[i]);
      float* const dp = dP.data[0][col / 8 + i / 2] + i % 2 * 2;
      dp[0] *= p.x * (1 / kExactScale);
      dp[1] *= p.y * (1 / kExactScale);
    }
  }
}

}  // namespace flash_attn::sm90
