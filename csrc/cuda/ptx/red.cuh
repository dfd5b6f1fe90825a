// fp32 additions into global memory that return nothing.
#pragma once

namespace flash_attn::ptx {

// red.global.add.f32, PTX ISA "red": relaxed, at device scope.
__device__ __forceinline__ void red_add(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// red.global.add.v2.f32 and .v4.f32, PTX ISA "red", sm_90 and newer; single additions before. The
// address is a multiple of the vector's size.
__device__ __forceinline__ void red_add_v2(float* address, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1,%2};" ::"l"(address), "f"(x), "f"(y)
               : "memory");
#else
  red_add(address, x);
  red_add(address + 1, y);
#endif
}

__device__ __forceinline__ void red_add_v4(float* address, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(address), "f"(x),
               "f"(y), "f"(z), "f"(w)
               : "memory");
#else
  red_add_v2(address, x, y);
  red_add_v2(address + 2, z, w);
#endif
}

}  // namespace flash_attn::ptx
