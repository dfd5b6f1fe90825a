#pragma once

#include <cstdint>

namespace flash_attn::ptx {

inline uint32_t smem_address(const void* pointer) { return simulator::shared_address(pointer); }

struct MatrixRows {
  uint32_t* r;
  uint32_t address;

  const uint16_t* row() const {
    if (address % 16 != 0) simulator::fault("ldmatrix: expected a multiple of 16 as address");
    return static_cast<const uint16_t*>(simulator::shared_pointer(address));
  }
};

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  MatrixRows mine = {r, row_address};
  simulator::meet("ldmatrix", ~0u, mine, [](MatrixRows** lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const uint16_t* row = lanes[8 * i + lane / 4]->row() + 2 * (lane % 4);
        lanes[lane]->r[i] = row[0] | static_cast<uint32_t>(row[1]) << 16;
      }
    }
  });
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_address) {
  MatrixRows mine = {r, row_address};
  simulator::meet("ldmatrix.trans", ~0u, mine, [](MatrixRows** lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * i + 2 * (lane % 4), col = lane / 4;
        lanes[lane]->r[i] =
            lanes[row]->row()[col] | static_cast<uint32_t>(lanes[row + 1]->row()[col]) << 16;
      }
    }
  });
}

}  // namespace flash_attn::ptx
