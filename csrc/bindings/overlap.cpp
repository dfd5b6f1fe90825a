#include "overlap.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <vector>

namespace flash_attn {
namespace {

// The distance between an element of the one tensor and one of the other is a sum over dimensions
// of stride · step, in bytes.
struct Steps {
  int64_t stride, first, last;  // first ≤ step ≤ last
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// Whether steps of `dims` from the given one on, longest stride first, add up to less than `bytes`
// away from `distance`.
bool reaches(const std::vector<Steps>& dims, size_t dim, int64_t distance, int64_t bytes) {
  if (dim == dims.size()) return std::abs(distance) < bytes;
  // What is left for the shorter strides has to lie in their range, so few steps are tried.
  int64_t lowest = 1 - bytes, highest = bytes - 1;
  for (size_t shorter = dim + 1; shorter < dims.size(); ++shorter) {
    lowest += dims[shorter].stride * dims[shorter].first;
    highest += dims[shorter].stride * dims[shorter].last;
  }
  const auto [stride, first, last] = dims[dim];
  const int64_t to = std::min(last, floor_div(distance - lowest, stride));
  for (int64_t step = std::max(first, -floor_div(highest - distance, stride)); step <= to; ++step) {
    if (reaches(dims, dim + 1, distance - stride * step, bytes)) return true;
  }
  return false;
}

int64_t span_bytes(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += tensor.stride(d) * (tensor.size(d) - 1);
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

// Whether each stride is longer than all that the smaller ones span, so that no two elements meet.
// True of every view that torch makes but expand and unfold.
bool strides_nest(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t spanned = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= spanned) return false;
    spanned += stride * (size - 1);
  }
  return true;
}

// Whether a byte belongs to an element of both. Exact: views that interleave share none. Both
// tensors' strides nest.
bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto begin_a = reinterpret_cast<intptr_t>(a.const_data_ptr()),
             begin_b = reinterpret_cast<intptr_t>(b.const_data_ptr());
  if (begin_a + span_bytes(a) <= begin_b || begin_b + span_bytes(b) <= begin_a) return false;

  std::map<int64_t, Steps, std::greater<>> by_stride;
  const auto add = [&](const at::Tensor& tensor, int64_t sign) {
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      if (tensor.size(d) == 1) continue;
      const int64_t stride = tensor.stride(d) * static_cast<int64_t>(tensor.element_size());
      Steps& steps = by_stride.try_emplace(stride, Steps{stride, 0, 0}).first->second;
      (sign > 0 ? steps.last : steps.first) += sign * (tensor.size(d) - 1);
    }
  };
  add(a, 1);
  add(b, -1);
  std::vector<Steps> dims;
  for (const auto& [stride, steps] : by_stride) dims.push_back(steps);
  return reaches(dims, 0, begin_b - begin_a, static_cast<int64_t>(a.element_size()));
}

void check_places(const char* name, const at::Tensor& cache) {
  TORCH_CHECK(strides_nest(cache), "flash_attn: ", name,
              ": expected one place in memory for each element, as it is updated in place, got "
              "strides ",
              cache.strides());
}

// Whether a write to the one cache is a write to the other. Pages of a pool may be K's under one
// number and V's under another, as transformers' continuous batching has them: who writes the block
// table keeps them apart. A page's own K and V have to be.
bool share_writes(const DecodeArgs& args) {
  const at::Tensor &k = args.k_cache, &v = args.v_cache;
  const bool by_pages = args.block_table && k.numel() != 0 && v.numel() != 0 &&
                        k.stride(0) * k.element_size() == v.stride(0) * v.element_size();
  return by_pages ? share_memory(k.select(0, 0), v.select(0, 0)) : share_memory(k, v);
}

}  // namespace

void check_writable(const KvcacheArgs& args) {
  if (args.k.numel() == 0) return;
  check_places("k_cache", args.decode.k_cache);
  check_places("v_cache", args.decode.v_cache);
  TORCH_CHECK(!share_writes(args.decode),
              "flash_attn: v_cache: expected memory of its own, as both caches are updated in "
              "place, got memory of k_cache");
}

}  // namespace flash_attn
