#pragma once

namespace flash_attn::ptx {

inline unsigned opaque(unsigned value) { return value; }

}  // namespace flash_attn::ptx
