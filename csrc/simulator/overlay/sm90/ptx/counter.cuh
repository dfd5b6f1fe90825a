// One thread runs at a time.
#pragma once

#include <cstdint>

namespace flash_attn::sm90::ptx {

inline int ld_relaxed(const int32_t* number) {
  simulator::poll();
  return *number;
}
inline int ld_acquire(const int32_t* number) { return ld_relaxed(number); }
inline void st_relaxed(int32_t* number, int value) { *number = value; }
inline int add_release(int32_t* number, int addend) {
  const int before = *number;
  *number += addend;
  return before;
}

}  // namespace flash_attn::sm90::ptx
