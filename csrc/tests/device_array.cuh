// Arrays of the unit tests on the device, and their comparison with what was expected.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "../cuda/launch.h"
#include "../cuda/tile/element.cuh"
#include "harness.h"

namespace flash_attn::tests {

template <typename Element>
constexpr const char* kNameOf = std::is_same_v<Element, __half>  ? "fp16"
                                : std::is_same_v<Element, float> ? "fp32"
                                                                 : "bf16";
template <typename Element>
constexpr DType kDTypeOf = std::is_same_v<Element, __half> ? DType::kFp16 : DType::kBf16;

template <typename Element>
Element rounded(float value) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<Element, float>) {
    return value;
  } else {
    return __float2bfloat16_rn(value);
  }
}

// What nothing has been written to, or nothing may read: all bits set, NaN in every type of float.
template <typename T>
T poison() {
  T value;
  std::memset(static_cast<void*>(&value), 0xff, sizeof(T));
  return value;
}

template <typename Element>
std::vector<Element> rounded(const std::vector<float>& values) {
  std::vector<Element> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = rounded<Element>(values[i]);
  return result;
}

// An array on the device that starts poisoned, between two poisoned zones that must stay so.
template <typename T>
class DeviceArray {
  static constexpr size_t kGuard = 4096;  // bytes

 public:
  explicit DeviceArray(size_t count) : count_(count) {
    FLASH_ATTN_CUDA_CHECK(cudaMalloc(&memory_, count * sizeof(T) + 2 * kGuard));
    FLASH_ATTN_CUDA_CHECK(cudaMemset(memory_, 0xff, count * sizeof(T) + 2 * kGuard));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    FLASH_ATTN_CUDA_CHECK(
        cudaMemcpy(data(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(memory_); }

  T* data() { return reinterpret_cast<T*>(memory_ + kGuard); }

  // Waits for the kernels before it.
  std::vector<T> read() {
    std::vector<unsigned char> bytes(count_ * sizeof(T) + 2 * kGuard);
    FLASH_ATTN_CUDA_CHECK(cudaMemcpy(bytes.data(), memory_, bytes.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < kGuard; ++i) {
      if (bytes[i] != 0xff) throw std::runtime_error("something wrote before an array");
      if (bytes[bytes.size() - 1 - i] != 0xff) {
        throw std::runtime_error("something wrote behind an array");
      }
    }
    std::vector<T> values(count_);
    std::memcpy(static_cast<void*>(values.data()), bytes.data() + kGuard, count_ * sizeof(T));
    return values;
  }

 private:
  size_t count_;
  unsigned char* memory_ = nullptr;
};

// what: the name of the array. Poison is equal to poison, 0 to -0.
template <typename T>
void expect_equal(const char* what, const std::vector<T>& actual, const std::vector<T>& expected) {
  const auto same = [](const T& a, const T& b) {
    return std::memcmp(&a, &b, sizeof(T)) == 0 || static_cast<float>(a) == static_cast<float>(b);
  };
  size_t first = 0, wrong = 0;
  for (size_t i = expected.size(); i-- > 0;) {
    if (same(actual[i], expected[i])) continue;
    first = i;
    ++wrong;
  }
  if (wrong > 0) {
    fail(what, wrong, expected.size(), first, static_cast<float>(actual[first]),
         static_cast<float>(expected[first]));
  }
}

}  // namespace flash_attn::tests
