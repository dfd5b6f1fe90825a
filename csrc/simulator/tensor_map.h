// What a simulated driver writes into the 128 bytes of a CUtensorMap.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_attn::simulator {

struct TensorMap {
  static constexpr int kRank = 5;
  char* base;
  uint64_t sizes[kRank];
  uint64_t byte_strides[kRank - 1];
  uint32_t box[kRank];
  uint32_t swizzle_bits;  // of the chunk's number, that the row's number changes
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

inline constexpr int kElementBytes = 2;

// Where a byte of a swizzled box lies in shared memory: the bits of the chunk of 16 bytes are
// joined with those of the row of 128 bytes.
inline uint32_t swizzled(uint32_t address, uint32_t bits) {
  return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4);
}

// visit(element in global memory or null if it lies outside, byte of the box) for each of a box.
template <typename Visit>
void for_each_element(const TensorMap& map, const int32_t (&at)[TensorMap::kRank], Visit visit) {
  uint32_t byte = 0;
  uint32_t i[TensorMap::kRank] = {};
  for (i[4] = 0; i[4] < map.box[4]; ++i[4]) {
    for (i[3] = 0; i[3] < map.box[3]; ++i[3]) {
      for (i[2] = 0; i[2] < map.box[2]; ++i[2]) {
        for (i[1] = 0; i[1] < map.box[1]; ++i[1]) {
          for (i[0] = 0; i[0] < map.box[0]; ++i[0], byte += kElementBytes) {
            bool inside = true;
            int64_t offset = 0;
            for (int d = 0; d < TensorMap::kRank; ++d) {
              const int64_t place = int64_t{at[d]} + i[d];
              inside = inside && place >= 0 && place < static_cast<int64_t>(map.sizes[d]);
              offset +=
                  place * (d == 0 ? kElementBytes : static_cast<int64_t>(map.byte_strides[d - 1]));
            }
            visit(inside ? map.base + offset : nullptr, byte);
          }
        }
      }
    }
  }
}

}  // namespace flash_attn::simulator
