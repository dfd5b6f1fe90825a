// The element types of the kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../../core/params.h"

namespace flash_attn {

template <DType kDType>
struct ElementOf;
template <>
struct ElementOf<DType::kFp16> {
  using type = __half;
};
template <>
struct ElementOf<DType::kBf16> {
  using type = __nv_bfloat16;
};

template <>
struct ElementOf<DType::kFp32> {
  using type = float;
};
// fp32 in memory; products round it to 11 significant bits.
struct Tf32 {
  float value;
};
template <>
struct ElementOf<DType::kTf32> {
  using type = Tf32;
};

template <DType kDType>
using Element = typename ElementOf<kDType>::type;

// Elements in 16 bytes, the unit of every copy.
template <typename Element>
inline constexpr int kChunkOf = 16 / static_cast<int>(sizeof(Element));
inline constexpr int kChunk = 8;  // of 16 bits

// Whether it is fp32. Else it has 16 bits.
template <typename Element>
inline constexpr bool kIsWide = sizeof(Element) == 4;

// The type of a bias "of q's dtype".
template <typename Element>
using BiasElement = std::conditional_t<kIsWide<Element>, float, Element>;

}  // namespace flash_attn
