#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>

#include "math.cuh"

namespace flash_attn::ptx {

struct MmaLane {
  float* d;
  uint32_t a[4], b[2];
  float c[4];
};

// d = a · b + c of a warp: 16 × 8 over kK, whose elements of a row lie side by side in registers,
// kPerRegister in each.
template <int kK, int kPerRegister, typename Unpack>
void multiply(MmaLane** lanes, const Unpack& unpack) {
  float a[16][kK], b[kK][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 4; ++r) {
      const int row = lane / 4 + r % 2 * 8;
      for (int e = 0; e < kPerRegister; ++e) {
        const int k = kPerRegister * (lane % 4) + e + r / 2 * (kK / 2);
        a[row][k] = unpack(lanes[lane]->a[r], e);
        if (r % 2 == 0) b[k][lane / 4] = unpack(lanes[lane]->b[r / 2], e);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, col = 2 * (lane % 4) + i % 2;
      float sum = lanes[lane]->c[i];
      for (int k = 0; k < kK; ++k) sum += a[row][k] * b[k][col];
      lanes[lane]->d[i] = sum;
    }
  }
}

template <typename Element>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  const float (&c)[4]) {
  MmaLane mine = {d, {a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  simulator::meet("mma.m16n8k16", ~0u, mine, [](MmaLane** lanes) {
    multiply<16, 2>(lanes, [](uint32_t pair, int which) {
      const float2 both = unpack<Element>(pair);
      return which == 0 ? both.x : both.y;
    });
  });
}

inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             const float (&c)[4]) {
  MmaLane mine = {d, {a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  simulator::meet("mma.m16n8k8", ~0u, mine, [](MmaLane** lanes) {
    multiply<8, 1>(lanes,
                   [](uint32_t number, int) { return std::bit_cast<float>(number & 0xffffe000u); });
  });
}

}  // namespace flash_attn::ptx
