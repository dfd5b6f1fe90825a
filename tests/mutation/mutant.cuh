// How a mutated expression asks whether its mutant acts. kernels.py puts this file beside the copied
// headers and includes it in each of them; nothing in csrc knows of it.
//
// An operator becomes a named one of the same precedence, `a < b` as `a <M<17, Less>{}> b`, so that
// no operand has to be found in the text. What is evaluated at compile time is never mutated.
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <type_traits>

namespace flash_attn::mutant {

static inline int chosen() {
  const char* const text = std::getenv("FLASH_ATTN_MUTANT");
  return text == nullptr ? 0 : std::atoi(text);
}

// Of this file of kernels, as each is compiled alone. Set before its first launch: all are static, as
// an inline function would be one for all files, and set the number of one.
#ifdef FLASH_ATTN_SIMULATE
static const int selected = chosen();
#else
static __constant__ int selected;

static inline void select() {
  static const bool done = [] {
    const int number = chosen();
    return cudaMemcpyToSymbol(selected, &number, sizeof number) == cudaSuccess &&
           cudaDeviceSynchronize() == cudaSuccess;
  }();
  if (!done) std::abort();
}
#endif

template <int kNumber>
__host__ __device__ constexpr bool acts() {
  // std::is_constant_evaluated() is the host's alone: called in a kernel it has no meaning, and every
  // mutant acted.
  if (__builtin_is_constant_evaluated()) return false;
#ifdef __CUDA_ARCH__
  return selected == kNumber;
#else
  return false;
#endif
}

template <int kNumber, class Other>
struct M {};

template <int kNumber, class Other, class Left>
struct Half {
  Left left;
};

#define FLASH_ATTN_NAMED(op)                                                                \
  template <class Left, int kNumber, class Other>                                           \
  __host__ __device__ constexpr Half<kNumber, Other, Left> operator op(Left left,           \
                                                                       M<kNumber, Other>) { \
    return {left};                                                                          \
  }
FLASH_ATTN_NAMED(<)
FLASH_ATTN_NAMED(==)
FLASH_ATTN_NAMED(+)
FLASH_ATTN_NAMED(*)
#undef FLASH_ATTN_NAMED

// Between < and >: Other says both what stood there and what stands there instead.
template <int kNumber, class Other, class Left, class Right>
__host__ __device__ constexpr auto operator>(Half<kNumber, Other, Left> half, Right right) {
  return acts<kNumber>() ? Other::other(half.left, right) : Other::original(half.left, right);
}
template <int kNumber, class Other, class Left, class Right>
__host__ __device__ constexpr auto operator==(Half<kNumber, Other, Left> half, Right right) {
  return acts<kNumber>() ? Other::other(half.left, right) : Other::original(half.left, right);
}
template <int kNumber, class Other, class Left, class Right>
__host__ __device__ constexpr auto operator+(Half<kNumber, Other, Left> half, Right right) {
  return acts<kNumber>() ? Other::other(half.left, right) : Other::original(half.left, right);
}
template <int kNumber, class Other, class Left, class Right>
__host__ __device__ constexpr auto operator*(Half<kNumber, Other, Left> half, Right right) {
  return acts<kNumber>() ? Other::other(half.left, right) : Other::original(half.left, right);
}

// Where the other operator has no meaning, of two pointers for one, the mutant changes nothing.
#define FLASH_ATTN_PAIR(Name, op, instead)                                      \
  struct Name {                                                                 \
    template <class L, class R>                                                 \
    __host__ __device__ static constexpr auto original(L l, R r) {              \
      return l op r;                                                            \
    }                                                                           \
    template <class L, class R>                                                 \
    __host__ __device__ static constexpr decltype(L() op R()) other(L l, R r) { \
      if constexpr (requires { l instead r; }) {                                \
        return l instead r;                                                     \
      } else {                                                                  \
        return l op r;                                                          \
      }                                                                         \
    }                                                                           \
  };
FLASH_ATTN_PAIR(Less, <, <=)
FLASH_ATTN_PAIR(LessEqual, <=, <)
FLASH_ATTN_PAIR(Greater, >, >=)
FLASH_ATTN_PAIR(GreaterEqual, >=, >)
FLASH_ATTN_PAIR(Equal, ==, !=)
FLASH_ATTN_PAIR(NotEqual, !=, ==)
FLASH_ATTN_PAIR(Plus, +, -)
FLASH_ATTN_PAIR(Minus, -, +)
FLASH_ATTN_PAIR(Times, *, +)
#undef FLASH_ATTN_PAIR

// A literal, or one more.
template <int kNumber, class Number>
__host__ __device__ constexpr Number literal(Number number) {
  return acts<kNumber>() ? number + 1 : number;
}

// The smaller of two, or the larger; and the other way round.
template <int kNumber, class A, class B>
__host__ __device__ constexpr std::common_type_t<A, B> minimum(A a, B b) {
  return (a < b) != acts<kNumber>() ? a : b;
}
template <int kNumber, class A, class B>
__host__ __device__ constexpr std::common_type_t<A, B> maximum(A a, B b) {
  return (a > b) != acts<kNumber>() ? a : b;
}

}  // namespace flash_attn::mutant
