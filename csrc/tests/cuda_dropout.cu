// cuda/attn/dropout.cuh: the keep-mask in registers, with queries as rows, with keys as rows and as
// bits, against its definition (aten/dropout.h), element by element.
#include <array>

#include "../cuda/attn/dropout.cuh"
#include "device_array.cuh"

namespace flash_attn::tests {
namespace {

constexpr int kRows = 32, kCols = 48;  // of the tile that the one warp looks at

// operand: 1 where drop() leaves all bits of an element, 0 where it clears them, 2 elsewhere.
// accumulator: what find_kept() says.
template <bool kTransposed>
__global__ void __launch_bounds__(32)
    dropout_kernel(const __grid_constant__ DropoutParams params, int64_t head_number, int first_row,
                   int first_col, float* operand, float* accumulator) {
  const int lane = threadIdx.x;
  const auto head = DropoutWords::of(params, head_number);
  const auto word = [&](bool of_key, int first, int within) {
    return of_key ? head.key_word(dropout_four(params, first, within))
                  : head.query_word(dropout_pair(params, first, within));
  };
  for (int row = 0; row < kRows; row += 16) {
    for (int col = 0; col < kCols; col += 16) {
      const int first_key = kTransposed ? first_row + row : first_col + col;
      const DropoutMask<kTransposed> mask(params, head.last, first_key % 32 != 0);
      const uint32_t row_word = word(kTransposed, first_row + row, lane / 4);
      uint32_t col_words[2];
      for (int i = 0; i < 2; ++i) {
        col_words[i] = word(!kTransposed, first_col + col, lane % 4 * 2 + i);
      }
      uint32_t block[4] = {~0u, ~0u, ~0u, ~0u};
      bool kept[2][4];
      mask.drop(block, row_word, col_words);
      mask.find_kept(kept, row_word, col_words);
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 4; ++i) {
          const uint32_t bits = block[i / 2 * 2 + half] >> i % 2 * 16 & 0xffff;
          const int index = (row + fragment_row(half, lane)) * kCols + col + fragment_col(i, lane);
          operand[index] = bits == 0xffff ? 1.f : bits == 0 ? 0.f : 2.f;
          accumulator[index] = kept[half][i] ? 1.f : 0.f;
        }
      }
    }
  }
}

// What KeptBits says of so many queries (rows) and keys, of which its user's lane has these pairs.
constexpr int kBitRows = 64, kBitCols = 32;
__global__ void __launch_bounds__(32)
    kept_bits_kernel(const __grid_constant__ DropoutParams params, int64_t head_number,
                     int first_query, int first_key, float* kept) {
  const int lane = threadIdx.x;
  const auto head = DropoutWords::of(params, head_number);
  const uint32_t of_key = head.key_word(dropout_four(params, first_key, lane / 4));
  KeptBits bits(params.mirror);
  for (int pair = 0; pair < 8; ++pair) {
    const int within = lane % 4 * 2 + pair % 2;
    const int query = first_query + pair / 2 * 16;
    bits.add(pair, head.query_word(dropout_pair(params, query, within)), of_key, head.last,
             params.bound);
  }
  for (int last_two = 0; last_two < 2; ++last_two) {
    const uint2 of_keys = bits.of_keys(last_two != 0);
    for (int n = 0; n < kBitRows / 8; ++n) {
      const uint32_t byte = (n < 4 ? of_keys.x : of_keys.y) >> n % 4 * 8;
      for (int i = 0; i < 4; ++i) {
        const int query = n * 8 + fragment_col(i % 2, lane), key = fragment_row(i / 2, lane);
        kept[query * kBitCols + last_two * 16 + key] = (byte >> i & 1) != 0 ? 1.f : 0.f;
      }
    }
  }
}

uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }
uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }

using Words4 = std::array<uint32_t, 4>;
using Words2 = std::array<uint32_t, 2>;

Words4 host_philox4x32(Words4 word, uint64_t key) {
  uint32_t key0 = low(key), key1 = high(key);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * word[0], b = uint64_t{0xCD9E8D57} * word[2];
    word = {high(b) ^ word[1] ^ key0, low(b), high(a) ^ word[3] ^ key1, low(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return word;
}

Words2 host_philox2x32(Words2 word, uint32_t key) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t product = uint64_t{0xD256D193} * word[0];
    word = {high(product) ^ word[1] ^ key, low(product)};
    key += 0x9E3779B9;
  }
  return word;
}

bool host_keeps(const Words4& head, int threshold, int query, int key) {
  constexpr uint64_t kMul = 0xD256D193;
  const auto group = [](int i, int block) { return static_cast<uint32_t>(i / block * 8 + i % 8); };
  const uint32_t of_query = host_philox2x32({group(query, 16), head[1]}, head[0])[0];
  const uint32_t of_key = host_philox2x32({group(key, 32), head[2]}, head[0])[0];
  const uint64_t p = kMul * (of_query ^ of_key), q = kMul * (high(p) ^ of_key);
  const uint32_t word = query / 8 % 2 == 0 ? high(q) ^ low(p) ^ head[3] : low(q);
  const auto byte = [&](int i) { return static_cast<int>(word >> 8 * i & 0xff); };
  const int at = key / 8 % 4;
  const int number = (byte(at) & 0x7f) * 2 + byte(at ^ 1) / 128;
  return threshold <= 128 ? number >= threshold : number < 256 - threshold;
}

// A head of a state, for each of some probabilities, and what is kept of its elements.
template <typename Test>
void with_each_threshold(Random& random, const Test& test) {
  constexpr int kThresholds[] = {1, 2, 15, 26, 127, 128, 129, 230, 255, 256};
  const auto word = [&] { return static_cast<int64_t>(random.integer(0, 1 << 30)) * 0x9E3779B97; };
  for (const int threshold : kThresholds) {
    const std::vector<int64_t> state = {word(), -word()};
    const int64_t head_number = random.integer(0, 1) * word() + random.integer(0, 100);
    const auto head = host_philox4x32(
        {low(head_number), high(head_number), low(state[1]), high(state[1])}, state[0]);
    DeviceArray<int64_t> device_state(state);
    const auto params = DropoutParams::make(threshold / 256., device_state.data());
    test(params, head_number,
         [&](int query, int key) { return host_keeps(head, threshold, query, key); });
  }
}

template <bool kTransposed>
void test_dropout(Random& random) {
  with_each_threshold(
      random, [&](const DropoutParams& params, int64_t head_number, const auto& keeps) {
        const int first_row = 16 * random.integer(0, 1 << 20);
        const int first_col = 16 * random.integer(0, 1 << 20);
        std::vector<float> expected(kRows * kCols);
        for (int i = 0; i < kRows * kCols; ++i) {
          const int row = first_row + i / kCols, col = first_col + i % kCols;
          expected[i] = kTransposed ? keeps(col, row) : keeps(row, col);
        }
        DeviceArray<float> operand(expected.size()), accumulator(expected.size());
        cuda::launch<dropout_kernel<kTransposed>>(1, 32, 0, nullptr, params, head_number, first_row,
                                                  first_col, operand.data(), accumulator.data());
        expect_equal("the operand", operand.read(), expected);
        expect_equal("the accumulator", accumulator.read(), expected);
      });
}

void test_kept_bits(Random& random) {
  with_each_threshold(random,
                      [&](const DropoutParams& params, int64_t head_number, const auto& keeps) {
                        const int first_query = 64 * random.integer(0, 1 << 18);
                        const int first_key = 32 * random.integer(0, 1 << 18);
                        std::vector<float> expected(kBitRows * kBitCols);
                        for (int i = 0; i < kBitRows * kBitCols; ++i) {
                          expected[i] = keeps(first_query + i / kBitCols, first_key + i % kBitCols);
                        }
                        DeviceArray<float> kept(expected.size());
                        cuda::launch<kept_bits_kernel>(1, 32, 0, nullptr, params, head_number,
                                                       first_query, first_key, kept.data());
                        expect_equal("the bits", kept.read(), expected);
                      });
}

}  // namespace

void add_cuda_dropout_tests(Tests& tests) {
  tests.push_back({"cuda/dropout-queries-as-rows", test_dropout<false>});
  tests.push_back({"cuda/dropout-keys-as-rows", test_dropout<true>});
  tests.push_back({"cuda/dropout-bits", test_kept_bits});
}

}  // namespace flash_attn::tests
