// Dropout's keep-mask in the registers of a matrix product. aten/dropout.h defines it: of each head
// (K, X, Y, Z) = Philox4x32-10; a word of each pair of queries {i, i + 8}, and one of each four
// keys {j, j + 8, j + 16, j + 24}, by Philox2x32-7 with key K; and of these eight elements two
// words, by two more multiplications. So what costs most is done once for a row or a column.
//
// A lane holds elements of one pair of queries and one four of keys whether the rows are queries or
// keys: four of them in a block of 16 × 16, and the others in the next block of keys. Blocks of
// queries begin at multiples of 16 in their sequence.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../ptx/half2.cuh"
#include "../ptx/permute.cuh"
#include "../tile/fragment.cuh"

namespace flash_attn {

// Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;

__device__ __forceinline__ void philox4x32(uint32_t (&word)[4], uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMul0 = 0xD2511F53, kMul1 = 0xCD9E8D57;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{word[0]} * kMul0, b = uint64_t{word[2]} * kMul1;
    word[0] = static_cast<uint32_t>(b >> 32) ^ word[1] ^ (key0 + round * kPhiloxWeyl0);
    word[1] = static_cast<uint32_t>(b);
    word[2] = static_cast<uint32_t>(a >> 32) ^ word[3] ^ (key1 + round * kPhiloxWeyl1);
    word[3] = static_cast<uint32_t>(a);
  }
}

// The first word of Philox2x32-7.
__device__ __forceinline__ uint32_t philox2x32(uint32_t first, uint32_t second, uint32_t key) {
  constexpr uint32_t kMul = 0xD256D193;
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t product = uint64_t{first} * kMul;
    first = static_cast<uint32_t>(product >> 32) ^ second ^ (key + round * kPhiloxWeyl0);
    second = static_cast<uint32_t>(product);
  }
  return first;
}

// Of eight elements: word r is that of query i + 8r, and its byte k that of key j + 8k.
__device__ __forceinline__ void mix_dropout_words(uint32_t (&word)[2], uint32_t of_query,
                                                  uint32_t of_key, uint32_t of_head) {
  constexpr uint32_t kMul = 0xD256D193;
  const uint64_t first = uint64_t{of_query ^ of_key} * kMul;
  const uint64_t second = uint64_t{static_cast<uint32_t>(first >> 32) ^ of_key} * kMul;
  word[0] = static_cast<uint32_t>(second >> 32) ^ static_cast<uint32_t>(first) ^ of_head;
  word[1] = static_cast<uint32_t>(second);
}

// What the numbers of one head depend on, whose queries and keys count from the first ones of the
// larger call (DropoutParams), where there is one.
struct DropoutWords {
  uint32_t philox_key, of_queries, of_keys, last;  // K, X, Y, Z

  // number is batch · heads_q + head of the call. It is below 2^32 where the larger call has more
  // heads.
  static __device__ __forceinline__ DropoutWords of(const DropoutParams& params, int64_t number) {
    if (params.more_heads != 0) {
      number += int64_t{static_cast<uint32_t>(number) / params.heads} * params.more_heads;
    }
    number += params.first_number;
    const int64_t seed = params.rng_state[0], offset = params.rng_state[1];
    uint32_t word[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32),
                        static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)};
    philox4x32(word, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    return {word[0], word[1], word[2], word[3]};
  }

  // pair: i / 16 · 8 + i % 8 of queries i and i + 8.
  __device__ __forceinline__ uint32_t query_word(int pair) const {
    return philox2x32(pair, of_queries, philox_key);
  }
  // four: j / 32 · 8 + j % 8 of keys j, j + 8, j + 16, j + 24.
  __device__ __forceinline__ uint32_t key_word(int four) const {
    return philox2x32(four, of_keys, philox_key);
  }
};

// The same, whose queries and keys count from the first ones of this call.
struct DropoutHead {
  DropoutWords words;
  int first_pair, first_four;

  static __device__ __forceinline__ DropoutHead of(const DropoutParams& params, int64_t number) {
    return {DropoutWords::of(params, number), params.first_pair, params.first_four};
  }
  __device__ __forceinline__ uint32_t query_word(int pair) const {
    return words.query_word(first_pair + pair);
  }
  __device__ __forceinline__ uint32_t key_word(int four) const {
    return words.key_word(first_four + four);
  }
};

// What a lane has of the mask of a head, a block of 16 × 16 at a time. With kTransposed rows are
// keys and columns queries, as in Sᵀ. row_word is the word of the lane's row, and col_words are
// those of its column and the next one. What is dropped of numbers rounded into an operand becomes
// 0.
template <bool kTransposed>
class DropoutMask {
 public:
  // odd: whether the block's keys begin at an odd multiple of 16.
  __device__ __forceinline__ DropoutMask(const DropoutParams& params, uint32_t last, bool odd)
      : params_(params), last_(last), odd_(odd) {}

  __device__ __forceinline__ void drop(uint32_t (&block)[4], uint32_t row_word,
                                       const uint32_t (&col_words)[2]) const {
    for_each_pair(row_word, col_words, [&](int index, uint32_t kept) { block[index] &= kept; });
  }

  // The same; in a second operand of the same place, without negative numbers, it becomes negative.
  __device__ __forceinline__ void drop_and_mark(uint32_t (&block)[4], uint32_t (&marked)[4],
                                                uint32_t row_word,
                                                const uint32_t (&col_words)[2]) const {
    for_each_pair(row_word, col_words, [&](int index, uint32_t kept) {
      block[index] &= kept;
      marked[index] |= ~kept & 0x80008000;
    });
  }

  // The same of its elements in an accumulator: kept[row][i] of the lane's rows (0: g, 1: g + 8)
  // and the four elements that it has of each, as Accumulator::at counts them.
  __device__ __forceinline__ void find_kept(bool (&kept)[2][4], uint32_t row_word,
                                            const uint32_t (&col_words)[2]) const {
    for_each_pair(row_word, col_words, [&](int index, uint32_t pair) {
      kept[index % 2][index / 2 * 2] = (pair & 0xffff) != 0;
      kept[index % 2][index / 2 * 2 + 1] = pair >> 16 != 0;
    });
  }

 private:
  // step(index, kept) for each register of an operand's block: all bits of a half where its element
  // is kept.
  template <typename Step>
  __device__ __forceinline__ void for_each_pair(uint32_t row_word, const uint32_t (&col_words)[2],
                                                const Step& step) const {
    uint32_t words[2][2];
#pragma unroll
    for (int neighbour = 0; neighbour < 2; ++neighbour) {
      const uint32_t col_word = col_words[neighbour];
      mix_dropout_words(words[neighbour], kTransposed ? col_word : row_word,
                        kTransposed ? row_word : col_word, last_);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        // Takes byte s, or s + 2, of both neighbours above its partner: a number whose upper eight
        // bits, but for the sign, are the element's own.
        const uint32_t bytes = s == 0 ? (odd_ ? 0x6723 : 0x4501) : (odd_ ? 0x7632 : 0x5410);
        const uint32_t numbers = ptx::permute_bytes(words[0][r], words[1][r], bytes);
        const uint32_t kept =
            ptx::greater_equal_or_nan2(ptx::absolute2(numbers), params_.bound) ^ params_.mirror;
        step(kTransposed ? s + 2 * r : r + 2 * s, kept);
      }
    }
  }

  const DropoutParams& params_;
  uint32_t last_;
  bool odd_;
};

// What is kept of a lane's elements of 64 queries and one four of keys, as bits. All eight numbers
// of a pair of queries and a four of keys are used here; a lane of a product has no more than four
// of them. The lane has eight pairs, i and i + 8: two neighbours of every 16 queries.
class KeptBits {
 public:
  // mirror, bound: DropoutParams'.
  __device__ __forceinline__ explicit KeptBits(uint32_t mirror)
      : bits_{{mirror, mirror}, {mirror, mirror}} {}

  __device__ __forceinline__ void add(int pair, uint32_t of_query, uint32_t of_key,
                                      uint32_t of_head, uint32_t bound) {
    uint32_t word[2];
    mix_dropout_words(word, of_query, of_key, of_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Each half has a byte above its partner: a number whose upper eight bits, but for the sign,
      // are the element's own. Of each half's mask one bit stays.
      const uint32_t even_bit = 0x00010001u << (pair / 2 % 2 * 8 + pair % 2);
      const uint32_t exchanged = ptx::permute_bytes(word[r], 0, 0x2301);
      uint32_t& bits = bits_[pair / 4][r];
      bits ^= ptx::greater_equal_or_nan2(ptx::absolute2(exchanged), bound) & even_bit;
      bits ^= ptx::greater_equal_or_nan2(ptx::absolute2(word[r]), bound) & even_bit << 2;
    }
  }

  // Of keys j and j + 8, or of j + 16 and j + 24, in the order of an accumulator with keys as rows:
  // a byte for each of eight blocks of eight queries, whose bit i belongs to the lane's i-th
  // element of the block. The other four bits mean nothing.
  __device__ __forceinline__ uint2 of_keys(bool last_two) const {
    const uint32_t bytes = last_two ? 0x7362 : 0x5140;
    return {ptx::permute_bytes(bits_[0][0], bits_[0][1], bytes),
            ptx::permute_bytes(bits_[1][0], bits_[1][1], bytes)};
  }

 private:
  uint32_t bits_[2][2];  // of 32 queries each, and of i or i + 8; a half for two of the keys
};

// Where a lane's rows and columns lie among the pairs of queries and the fours of keys of the
// larger call, from the first of a block of 16. Where this one begins is read at each use, as a
// constant: it is no number that a kernel keeps.
__device__ __forceinline__ int dropout_pair(const DropoutParams& params, int first_query,
                                            int within) {
  return params.first_pair + first_query / 2 + within;
}
__device__ __forceinline__ int dropout_four(const DropoutParams& params, int first_key,
                                            int within) {
  return params.first_four + first_key / 32 * 8 + within;
}

}  // namespace flash_attn
