// Between natural logarithms and those of base 2, in which exponentials are computed.
#pragma once

namespace flash_attn {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

}  // namespace flash_attn
