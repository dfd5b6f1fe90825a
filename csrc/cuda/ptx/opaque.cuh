// A value that the optimiser knows nothing about.
#pragma once

namespace flash_attn::ptx {

// No instruction. What is computed from the result is computed where it is used: the compiler
// cannot hoist it out of a loop. Symptom where it is missing: STL of loop-invariant addresses
// before the loop, LDL of them inside.
__device__ __forceinline__ unsigned opaque(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace flash_attn::ptx
