#pragma once

namespace flash_attn::ptx {

inline void red_add(float* address, float value) { *address += value; }
inline void red_add_v2(float* address, float x, float y) {
  red_add(address, x);
  red_add(address + 1, y);
}
inline void red_add_v4(float* address, float x, float y, float z, float w) {
  red_add_v2(address, x, y);
  red_add_v2(address + 2, z, w);
}

}  // namespace flash_attn::ptx
