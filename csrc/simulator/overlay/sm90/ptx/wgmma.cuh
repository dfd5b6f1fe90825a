#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <functional>

#include "../../cuda/ptx/math.cuh"
#include "../../simulator/tensor_map.h"

namespace flash_attn::sm90::ptx {

inline void pin(float&) {}
inline void pin(uint32_t&) {}

enum class Major : uint8_t { kK, kMn };

// The quarter of a warpgroup's product that one warp has: 16 rows of a and d.
struct ProductLane {
  float* d;
  uint32_t a[4];
};

inline void wgmma_fence() {
  int mine = 0;
  simulator::meet("wgmma.fence", ~0u, mine, [](int**) {});
}
inline void wgmma_commit() {
  int mine = 0;
  simulator::meet("wgmma.commit_group", ~0u, mine,
                  [](int**) { ++simulator::this_thread().warp->committed_groups; });
}
template <int kPending>
void wgmma_wait() {
  int mine = 0;
  simulator::meet("wgmma.wait_group", ~0u, mine, [](int**) {
    simulator::Warp& warp = *simulator::this_thread().warp;
    warp.run_products(warp.committed_groups - kPending);
  });
}

// Elements of an operand in shared memory, by its descriptor (PTX ISA "Matrix descriptor"). Without
// a swizzle it is made of blocks of 8 rows of 16 bytes.
template <typename Element>
class DescribedOperand {
 public:
  DescribedOperand(uint64_t descriptor, Major major)
      : start_((descriptor & 0x3fff) * 16),
        leading_((descriptor >> 16 & 0x3fff) * 16),
        stride_((descriptor >> 32 & 0x3fff) * 16),
        swizzle_bits_((4 - (descriptor >> 62)) % 4),
        row_bytes_(16u << swizzle_bits_),
        major_(major) {}

  float at(int mn, int k) const {
    uint32_t address = start_;
    if (major_ == Major::kK) {
      address += mn / 8 * stride_ + mn % 8 * row_bytes_;
      address += swizzle_bits_ == 0 ? k / 8 * leading_ + k % 8 * 2 : k * 2;
    } else if (swizzle_bits_ == 0) {
      address += mn / 8 * stride_ + mn % 8 * 2 + k / 8 * leading_ + k % 8 * row_bytes_;
    } else {
      const int of_row = row_bytes_ / 2;
      address += mn / of_row * leading_ + mn % of_row * 2 + k / 8 * stride_ + k % 8 * row_bytes_;
    }
    const void* element = simulator::shared_pointer(simulator::swizzled(address, swizzle_bits_));
    return flash_attn::ptx::unpack<Element>(*static_cast<const uint16_t*>(element)).x;
  }

 private:
  uint32_t start_, leading_, stride_, swizzle_bits_, row_bytes_;
  Major major_;
};

template <typename Element, int kN>
struct Wgmma {
  template <Major kMajorA, Major kMajorB>
  static void ss(float (&d)[kN / 8][4], uint64_t a, uint64_t b, int accumulate) {
    ProductLane mine = {d[0], {}};
    simulator::meet("wgmma.mma_async", ~0u, mine, [&](ProductLane** lanes) {
      const int first_row = simulator::this_thread().index.x / 32 % 4 * 16;
      start(
          lanes,
          [=](const Lanes&, float (&of_a)[16][16]) {
            const DescribedOperand<Element> operand(a, kMajorA);
            for (int row = 0; row < 16; ++row) {
              for (int k = 0; k < 16; ++k) of_a[row][k] = operand.at(first_row + row, k);
            }
          },
          b, kMajorB, accumulate);
    });
  }
  template <Major kMajorB>
  static void rs(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    ProductLane mine = {d[0], {a[0], a[1], a[2], a[3]}};
    simulator::meet("wgmma.mma_async", ~0u, mine, [&](ProductLane** lanes) {
      start(
          lanes,
          [](const Lanes& lanes, float (&of_a)[16][16]) {
            for (int lane = 0; lane < 32; ++lane) {
              for (int r = 0; r < 4; ++r) {
                const float2 pair = flash_attn::ptx::unpack<Element>(lanes.of[lane].a[r]);
                const int row = lane / 4 + r % 2 * 8, k = 2 * (lane % 4) + r / 2 * 8;
                of_a[row][k] = pair.x;
                of_a[row][k + 1] = pair.y;
              }
            }
          },
          b, kMajorB, accumulate);
    });
  }

 private:
  struct Lanes {
    ProductLane of[32];
  };

  template <typename ReadA>
  static void start(ProductLane** brought, const ReadA& read_a, uint64_t b, Major major_b,
                    int accumulate) {
    Lanes lanes;
    for (int lane = 0; lane < 32; ++lane) lanes.of[lane] = *brought[lane];
    simulator::Warp& warp = *simulator::this_thread().warp;
    warp.products.push_back({warp.committed_groups, [=] {
                               float of_a[16][16], of_b[16][kN];
                               read_a(lanes, of_a);
                               const DescribedOperand<Element> operand(b, major_b);
                               for (int k = 0; k < 16; ++k) {
                                 for (int col = 0; col < kN; ++col)
                                   of_b[k][col] = operand.at(col, k);
                               }
                               for (int row = 0; row < 16; ++row) {
                                 float sums[kN] = {};
                                 for (int k = 0; k < 16; ++k) {
                                   for (int col = 0; col < kN; ++col)
                                     sums[col] += of_a[row][k] * of_b[k][col];
                                 }
                                 for (int col = 0; col < kN; ++col) {
                                   const int lane = row % 8 * 4 + col % 8 / 2;
                                   float& d = lanes.of[lane].d[col / 8 * 4 + row / 8 * 2 + col % 2];
                                   d = accumulate != 0 ? d + sums[col] : sums[col];
                                 }
                               }
                             }});
    if (simulator::is_quick()) warp.run_products(warp.committed_groups + 1);
  }
};

}  // namespace flash_attn::sm90::ptx
