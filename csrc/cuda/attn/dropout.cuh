// Dropout's keep-mask in the registers of a matrix product. aten/dropout.h defines it: of each head
// (K, X, Y, ·) = Philox4x32-10, and of the four elements {i, i + 8} × {j, j + 8} of a block of
// 16 × 16, with i = 16a + 8r + u and j = 16b + 8s + v, the two words
//
//   (w₀, w₁) = Philox2x32-7(counter ((8a + u) xor X, (8b + v) xor Y), key K)
//
// whose 15 bits from 16s on in w_r decide. A lane holds these four elements whether the rows are
// queries or keys; of two neighbouring columns it has two calls for the eight elements of a block.
// Blocks begin at multiples of 16 in their sequence.
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

__device__ __forceinline__ void philox2x32(uint32_t (&word)[2], uint32_t key) {
  constexpr uint32_t kMul = 0xD256D193;
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t product = uint64_t{word[0]} * kMul;
    word[0] = static_cast<uint32_t>(product >> 32) ^ word[1] ^ (key + round * kPhiloxWeyl0);
    word[1] = static_cast<uint32_t>(product);
  }
}

// What the numbers of one head depend on.
struct DropoutHead {
  uint32_t philox_key, of_queries, of_keys;  // K, X, Y

  // number: batch · heads_q + head.
  static __device__ __forceinline__ DropoutHead of(const DropoutParams& params, int64_t number) {
    const int64_t seed = params.rng_state[0], offset = params.rng_state[1];
    uint32_t word[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32),
                        static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)};
    philox4x32(word, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    return {word[0], word[1], word[2]};
  }
};

// A lane's part of the mask of a head. Transposed: rows are keys and columns queries, as in Sᵀ.
template <bool kTransposed>
class DropoutMask {
 public:
  __device__ __forceinline__ DropoutMask(const DropoutParams& params, const DropoutHead& head,
                                         int lane)
      : params_(params),
        philox_key_(head.philox_key),
        of_rows_(kTransposed ? head.of_keys : head.of_queries),
        of_cols_(kTransposed ? head.of_queries : head.of_keys),
        lane_(lane) {}

  // Of the block of 16 × 16 whose first row and column are these, rounded into an operand, what is
  // dropped becomes 0.
  __device__ __forceinline__ void drop(uint32_t (&block)[4], int first_row, int first_col) const {
    for_each_pair(first_row, first_col, [&](int index, uint32_t kept) { block[index] &= kept; });
  }

  // The same; in a second operand of the same place, without negative numbers, it becomes negative.
  __device__ __forceinline__ void drop_and_mark(uint32_t (&block)[4], uint32_t (&marked)[4],
                                                int first_row, int first_col) const {
    for_each_pair(first_row, first_col, [&](int index, uint32_t kept) {
      block[index] &= kept;
      marked[index] |= ~kept & 0x80008000;
    });
  }

  // The same of its elements in an accumulator: kept[row][i] of the lane's rows (0: g, 1: g + 8) and
  // the four elements that it has of each, as Accumulator::at counts them.
  __device__ __forceinline__ void find_kept(bool (&kept)[2][4], int first_row,
                                            int first_col) const {
    uint32_t words[2][2];
    draw(words, first_row, first_col);
#pragma unroll
    for (int neighbour = 0; neighbour < 2; ++neighbour) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        bool& low = kTransposed ? kept[0][2 * r + neighbour] : kept[r][neighbour];
        bool& high = kTransposed ? kept[1][2 * r + neighbour] : kept[r][2 + neighbour];
        ptx::greater_equal_or_nan2(ptx::absolute2(words[neighbour][r]), params_.bound,
                                   params_.mirror != 0, low, high);
      }
    }
  }

 private:
  // step(index, kept) for each register of an operand's block: all bits of a half where its element is
  // kept.
  template <typename Step>
  __device__ __forceinline__ void for_each_pair(int first_row, int first_col,
                                                const Step& step) const {
    uint32_t words[2][2];
    draw(words, first_row, first_col);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        // The halves s of both neighbours.
        const uint32_t numbers =
            ptx::permute_bytes(words[0][r], words[1][r], s == 0 ? 0x5410 : 0x7632);
        step(kTransposed ? s + 2 * r : r + 2 * s,
             ptx::greater_equal_or_nan2(ptx::absolute2(numbers), params_.bound) ^ params_.mirror);
      }
    }
  }

  // words[neighbour][r]: of the columns 2t + neighbour and 2t + neighbour + 8.
  __device__ __forceinline__ void draw(uint32_t (&words)[2][2], int first_row,
                                       int first_col) const {
    const uint32_t row = (first_row / 2 + lane_ / 4) ^ of_rows_;
    const uint32_t col = (first_col / 2 + lane_ % 4 * 2) ^ of_cols_;
#pragma unroll
    for (uint32_t neighbour = 0; neighbour < 2; ++neighbour) {
      words[neighbour][kTransposed ? 1 : 0] = row;
      words[neighbour][kTransposed ? 0 : 1] = col ^ neighbour;
      philox2x32(words[neighbour], philox_key_);
    }
  }

  const DropoutParams& params_;
  uint32_t philox_key_, of_rows_, of_cols_;
  int lane_;
};

}  // namespace flash_attn
