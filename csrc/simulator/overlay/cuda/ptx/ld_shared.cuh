#pragma once

#include <cstdint>

namespace flash_attn::ptx {

inline uint32_t load_shared(uint32_t address) {
  return *static_cast<const uint32_t*>(simulator::shared_pointer(address));
}
inline void load_shared_v2(uint32_t& first, uint32_t& second, uint32_t address) {
  if (address % 8 != 0) simulator::fault("ld.shared.v2: expected a multiple of 8 as address");
  first = load_shared(address);
  second = load_shared(address + 4);
}

}  // namespace flash_attn::ptx
