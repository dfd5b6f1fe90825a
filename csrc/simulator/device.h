// What nvcc gives to a kernel, for a host compiler. Included before anything else of a .cu file.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "machine.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __grid_constant__
#undef __launch_bounds__
#undef __cluster_dims__
#define __global__
#define __device__
#define __host__
#define __shared__ thread_local  // a block is a thread of the host
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __CUDACC__
#define __CUDA_ARCH__ (10 * FLASH_ATTN_SIMULATE)

#define threadIdx (::flash_attn::simulator::this_thread().index)
#define blockIdx (::flash_attn::simulator::block_index())
#define blockDim (::flash_attn::simulator::block_dimensions())
#define gridDim (::flash_attn::simulator::grid_dimensions())

// CUDA's min and max take numbers of two types, and of two numbers the one that is not NaN.
template <typename A, typename B>
auto max(A a, B b) {
  using Both = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<Both>) return static_cast<Both>(std::fmax(a, b));
  return std::max<Both>(a, b);
}
template <typename A, typename B>
auto min(A a, B b) {
  using Both = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<Both>) return static_cast<Both>(std::fmin(a, b));
  return std::min<Both>(a, b);
}

using std::isfinite;
using std::isnan;
using std::signbit;

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyintf(x)); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  const auto both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both << std::min(shift, 32u) >> 32);
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return std::max({a, b, c}); }
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, const T& value) {
  *address = value;
}

inline int atomicAdd(int* address, int value) {
  const int before = *address;
  *address += value;
  return before;
}
inline int atomicMax(int* address, int value) {
  const int before = *address;
  *address = std::max(before, value);
  return before;
}
inline unsigned atomicMin(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address = std::min(before, value);
  return before;
}

inline void __nanosleep(unsigned) { ::flash_attn::simulator::poll(); }
inline void __syncthreads() {
  ::flash_attn::simulator::barrier_arrive(0, ::flash_attn::simulator::block_dimensions().x, true);
}
inline int __syncthreads_or(int value) { return ::flash_attn::simulator::block_any(value); }
inline int __syncthreads_and(int value) { return ::flash_attn::simulator::block_all(value); }

namespace flash_attn::simulator {

// result(brought, lane) of each lane.
template <typename T, typename Result>
auto of_all_lanes(const char* what, unsigned mask, T value, const Result& result) {
  using Of = decltype(result(static_cast<const T*>(nullptr), 0u));
  struct Mine {
    T value;
    Of result;
  } mine = {value, {}};
  meet(what, mask, mine, [&](Mine** brought) {
    T values[32];
    unsigned present = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if (brought[lane] == nullptr) continue;
      values[lane] = brought[lane]->value;
      present |= 1u << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (brought[lane] != nullptr) brought[lane]->result = result(values, present);
    }
  });
  return mine.result;
}

// from(lane): the lane that each takes its value from; itself where that one is absent.
template <typename T, typename From>
T shuffle(const char* what, unsigned mask, T value, const From& from) {
  struct Mine {
    T value, result;
    int from;
  } mine = {value, value, from(this_thread().lane)};
  meet(what, mask, mine, [](Mine** brought) {
    for (int lane = 0; lane < 32; ++lane) {
      Mine* const to = brought[lane];
      if (to != nullptr && brought[to->from & 31] != nullptr) {
        to->result = brought[to->from & 31]->value;
      }
    }
  });
  return mine.result;
}

template <typename T, typename Join>
T reduce(const char* what, unsigned mask, T value, const Join& join) {
  return of_all_lanes(what, mask, value, [&join](const T* values, unsigned present) {
    T result = values[std::countr_zero(present)];
    for (int lane = std::countr_zero(present) + 1; lane < 32; ++lane) {
      if (present >> lane & 1) result = join(result, values[lane]);
    }
    return result;
  });
}

}  // namespace flash_attn::simulator

inline void __syncwarp(unsigned mask = ~0u) {
  ::flash_attn::simulator::of_all_lanes("__syncwarp", mask, 0,
                                        [](const int*, unsigned) { return 0; });
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return ::flash_attn::simulator::shuffle("__shfl_sync", mask, value, [=](int lane) {
    return (lane & ~(width - 1)) | (source & (width - 1));
  });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return ::flash_attn::simulator::shuffle("__shfl_xor_sync", mask, value, [=](int lane) {
    const int source = lane ^ bits;
    return (source & ~(width - 1)) == (lane & ~(width - 1)) ? source : lane;
  });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32) {
  return ::flash_attn::simulator::shuffle("__shfl_up_sync", mask, value, [=](int lane) {
    return lane % width >= distance ? lane - distance : lane;
  });
}
inline unsigned __ballot_sync(unsigned mask, int value) {
  return ::flash_attn::simulator::of_all_lanes("__ballot_sync", mask, value,
                                               [](const int* values, unsigned present) {
                                                 unsigned result = 0;
                                                 for (int lane = 0; lane < 32; ++lane) {
                                                   if (present >> lane & 1 && values[lane] != 0)
                                                     result |= 1u << lane;
                                                 }
                                                 return result;
                                               });
}
inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, value == 0) == 0; }
inline unsigned __match_any_sync(unsigned mask, int value) {
  struct Mine {
    int value;
    unsigned same;
  } mine = {value, 0};
  ::flash_attn::simulator::meet("__match_any_sync", mask, mine, [](Mine** brought) {
    for (int to = 0; to < 32; ++to) {
      for (int lane = 0; lane < 32 && brought[to] != nullptr; ++lane) {
        if (brought[lane] != nullptr && brought[lane]->value == brought[to]->value) {
          brought[to]->same |= 1u << lane;
        }
      }
    }
  });
  return mine.same;
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return ::flash_attn::simulator::reduce("__reduce_add_sync", mask, value, std::plus<T>());
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return ::flash_attn::simulator::reduce("__reduce_min_sync", mask, value,
                                         [](T a, T b) { return std::min(a, b); });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return ::flash_attn::simulator::reduce("__reduce_max_sync", mask, value,
                                         [](T a, T b) { return std::max(a, b); });
}
