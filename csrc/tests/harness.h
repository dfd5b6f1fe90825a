// What the unit tests of the tile layers share. A test is a small kernel on fresh random inputs;
// what it must give is computed on the host, element by element, in the plainest way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

namespace flash_attn::tests {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  // Both ends included.
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  float normal() { return std::normal_distribution<float>()(engine_); }

 private:
  std::mt19937_64 engine_;
};

// A test fails by throwing. Its name is "<folder of csrc>/<what>".
struct Test {
  std::string name;
  std::function<void(Random&)> run;
};
using Tests = std::vector<Test>;

// Each file of tests has one.
void add_cuda_tile_tests(Tests& tests);
void add_cuda_dropout_tests(Tests& tests);
void add_sm90_gemm_tests(Tests& tests);
void add_sm90_copy_tests(Tests& tests);
void add_sm90_scheduler_tests(Tests& tests);
void add_sm90_sync_tests(Tests& tests);
void add_sm90_terms_tests(Tests& tests);

// "<parts[0]>-<parts[1]>-…"
std::string test_name(std::initializer_list<std::string> parts);

// Whole numbers, whose products and sums are exact in every type here, so that results are compared
// bit by bit.
std::vector<float> whole_numbers(Random& random, size_t count);
std::vector<float> normal_numbers(Random& random, size_t count);

[[noreturn]] void fail(const std::string& what, size_t wrong, size_t of, size_t first, float actual,
                       float expected);

}  // namespace flash_attn::tests
