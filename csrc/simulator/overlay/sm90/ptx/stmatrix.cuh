#pragma once

#include <cstdint>

namespace flash_attn::sm90::ptx {

struct StoredRows {
  uint32_t r[4], address;

  uint16_t* row() const {
    if (address % 16 != 0) simulator::fault("stmatrix: expected a multiple of 16 as address");
    return static_cast<uint16_t*>(simulator::shared_pointer(address));
  }
};

inline void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
  StoredRows mine = {{r[0], r[1], r[2], r[3]}, row_address};
  simulator::meet("stmatrix", ~0u, mine, [](StoredRows** lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        uint16_t* row = lanes[8 * i + lane / 4]->row() + 2 * (lane % 4);
        row[0] = static_cast<uint16_t>(lanes[lane]->r[i]);
        row[1] = static_cast<uint16_t>(lanes[lane]->r[i] >> 16);
      }
    }
  });
}
inline void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
  StoredRows mine = {{r[0], r[1], r[2], r[3]}, row_address};
  simulator::meet("stmatrix.trans", ~0u, mine, [](StoredRows** lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * i + 2 * (lane % 4), col = lane / 4;
        lanes[row]->row()[col] = static_cast<uint16_t>(lanes[lane]->r[i]);
        lanes[row + 1]->row()[col] = static_cast<uint16_t>(lanes[lane]->r[i] >> 16);
      }
    }
  });
}

}  // namespace flash_attn::sm90::ptx
