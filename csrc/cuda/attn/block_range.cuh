// Which keys a query sees (causal, sliding window, length), and from that which blocks a kernel
// visits.
#pragma once

#include <cstdint>

#include "../../core/params.h"

namespace flash_attn {

// Query i sees keys [first_key(i), end_key(i)); key j is seen by queries [first_query(j),
// end_query(j)). Causal (window_right = 0), len_q 4, len_k 6, and the same with window_left = 2:
//
//   bottom-right        top-left            bottom-right, window_left 2
//   q0  1 1 1 0 0 0     1 0 0 0 0 0         1 1 1 0 0 0
//   q1  1 1 1 1 0 0     1 1 0 0 0 0         0 1 1 1 0 0
//   q2  1 1 1 1 1 0     1 1 1 0 0 0         0 0 1 1 1 0
//   q3  1 1 1 1 1 1     1 1 1 1 0 0         0 0 0 1 1 1
class AttentionWindow {
 public:
  __device__ __forceinline__ AttentionWindow(const AttnParams& params, int len_q, int len_k)
      : AttentionWindow(len_q, len_k, params.top_left ? 0 : static_cast<int64_t>(len_k) - len_q,
                        params.window_left, params.window_right) {}
  // diagonal: the key of query 0 that the windows count from; -1: no limit.
  __device__ __forceinline__ AttentionWindow(int len_q, int len_k, int64_t diagonal,
                                             int window_left, int window_right)
      : len_q_(len_q),
        len_k_(len_k),
        left_(window_left < 0 ? kUnlimited : diagonal - window_left),
        right_(window_right < 0 ? -kUnlimited : diagonal + window_right + 1) {}

  __device__ __forceinline__ int len_q() const { return len_q_; }
  __device__ __forceinline__ int len_k() const { return len_k_; }
  // Results lie in [0, length]; an empty interval may come with first > end.
  __device__ __forceinline__ int first_key(int query) const { return clamp(query + left_, len_k_); }
  __device__ __forceinline__ int end_key(int query) const { return clamp(query + right_, len_k_); }
  __device__ __forceinline__ int first_query(int key) const {
    return clamp(key - right_ + 1, len_q_);
  }
  __device__ __forceinline__ int end_query(int key) const { return clamp(key - left_ + 1, len_q_); }

 private:
  static constexpr int64_t kUnlimited = -(int64_t{1} << 40);  // beyond any sum of two lengths

  __device__ __forceinline__ static int clamp(int64_t value, int limit) {
    return static_cast<int>(value < 0 ? 0 : value > limit ? limit : value);
  }

  int len_q_, len_k_;
  int64_t left_, right_;  // query i sees keys i + left_ <= j < i + right_
};

// The blocks [begin, end) that one block of the other side visits; of these [full_begin, full_end)
// need no mask. Causal, one block of queries (rows) against blocks of keys:
//
//   1 1 1 1 │ 1 1 1 1 │ 1 0 0 0 │ 0 0 0 0
//   1 1 1 1 │ 1 1 1 1 │ 1 1 0 0 │ 0 0 0 0
//   full      full      masked    skipped        begin = full_begin = 0, full_end = 2, end = 3
struct BlockRange {
  int begin, full_begin, full_end, end;

  // Blocks of kBlockN keys for the queries [first_row, first_row + kBlockM).
  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ static BlockRange of_keys(const AttentionWindow& window,
                                                       int first_row) {
    const int last_row = min(first_row + kBlockM, window.len_q()) - 1;
    if (last_row < first_row) return {0, 0, 0, 0};
    return of<kBlockN>(window.first_key(first_row), window.end_key(last_row),
                       window.first_key(last_row), window.end_key(first_row));
  }

  // Piece `index` of `count` equal ones; the last ones may have less, or nothing.
  __device__ __forceinline__ BlockRange piece(int index, int count) const {
    const int each = (end - begin + count - 1) / count;
    const int first = min(begin + index * each, end);
    return {first, full_begin, full_end, min(first + each, end)};
  }

  // Blocks of kBlockM queries for the keys [first_key, first_key + kBlockN). A block of keys that
  // reaches beyond len_k is masked throughout.
  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ static BlockRange of_queries(const AttentionWindow& window,
                                                          int first_key) {
    const int last_key = min(first_key + kBlockN, window.len_k()) - 1;
    if (last_key < first_key) return {0, 0, 0, 0};
    const bool whole = last_key == first_key + kBlockN - 1;
    return of<kBlockM>(window.first_query(first_key), window.end_query(last_key),
                       whole ? window.first_query(last_key) : window.len_q(),
                       whole ? window.end_query(first_key) : 0);
  }

 private:
  // [first, end): seen by at least one; [all_first, all_end): seen by all.
  template <int kBlock>
  __device__ __forceinline__ static BlockRange of(int first, int end, int all_first, int all_end) {
    BlockRange range;
    range.begin = first / kBlock;
    range.end = end > first ? (end + kBlock - 1) / kBlock : range.begin;
    range.full_begin = min(max((all_first + kBlock - 1) / kBlock, range.begin), range.end);
    range.full_end = min(max(all_end / kBlock, range.full_begin), range.end);
    return range;
  }
};

}  // namespace flash_attn
