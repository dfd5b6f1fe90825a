// The unit tests of the tile layers as a C interface, for tests/test_tiles.py.
#include "harness.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace flash_attn::tests {

std::string test_name(std::initializer_list<std::string> parts) {
  std::string name;
  for (const std::string& part : parts) {
    if (!name.empty()) name += '-';
    name += part;
  }
  return name;
}

std::vector<float> whole_numbers(Random& random, size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.integer(-100, 100));
  return values;
}

std::vector<float> normal_numbers(Random& random, size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = random.normal();
  return values;
}

namespace {

// All bits of it, however small or large.
std::string shown(float value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

}  // namespace

void fail(const std::string& what, size_t wrong, size_t of, size_t first, float actual,
          float expected) {
  throw std::runtime_error(what + ": " + std::to_string(wrong) + " of " + std::to_string(of) +
                           " elements are wrong, the first [" + std::to_string(first) +
                           "]: expected " + shown(expected) + ", got " + shown(actual));
}

namespace {

const Tests& all_tests() {
  static const Tests tests = [] {
    Tests list;
    add_cuda_tile_tests(list);
    add_cuda_dropout_tests(list);
    add_sm90_gemm_tests(list);
    add_sm90_copy_tests(list);
    add_sm90_scheduler_tests(list);
    add_sm90_sync_tests(list);
    add_sm90_terms_tests(list);
    return list;
  }();
  return tests;
}

}  // namespace
}  // namespace flash_attn::tests

#define FLASH_ATTN_EXPORT extern "C" __attribute__((visibility("default")))

FLASH_ATTN_EXPORT int flash_attn_tile_tests_count() {
  return static_cast<int>(flash_attn::tests::all_tests().size());
}

FLASH_ATTN_EXPORT const char* flash_attn_tile_tests_name(int index) {
  return flash_attn::tests::all_tests()[index].name.c_str();
}

// 0: passed. Else message, of at most size bytes, says what was wrong.
FLASH_ATTN_EXPORT int flash_attn_tile_tests_run(int index, uint64_t seed, char* message, int size) {
  try {
    flash_attn::tests::Random random(seed);
    flash_attn::tests::all_tests()[index].run(random);
    return 0;
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), size - 1);
    message[size - 1] = '\0';
    return 1;
  }
}
