// One row of decode's result, from the kernel that reads the keys or the one that merges.
#pragma once

#include <type_traits>

#include "../attn/merge.cuh"
#include "../ptx/math.cuh"
#include "../tile/element.cuh"
#include "workspace.h"

namespace flash_attn::cuda {

template <bool kWide = false>  // fp32
struct OutputRow {
  using Word = std::conditional_t<kWide, float, uint16_t>;  // of one element
  Word* out;
  int64_t lse_index;

  __device__ __forceinline__ OutputRow(const DecodeParams& params, int batch_idx, int head,
                                       int token)
      : out(static_cast<Word*>(params.out) + batch_idx * params.out_strides.batch +
            token * params.out_strides.row + head * params.out_strides.head),
        lse_index((static_cast<int64_t>(batch_idx) * params.heads_q + head) * params.seqlen_q +
                  token) {}

  // Stores the row's lse, with the sink in it: a key with a score and no value, by which all o of
  // the row shrink. Returns by how much.
  __device__ __forceinline__ float finish_lse(const DecodeParams& params, int head, float lse,
                                              bool stores) const {
    float factor = 1.f;
    if (params.score.learnable_sink != nullptr) {
      const float sink = bounded_sink(params.score.learnable_sink[head]);
      const float reference = merge_reference(fmaxf(lse, sink));
      const float joined =
          merge_finish(reference, merge_weight(lse, reference) + merge_weight(sink, reference));
      factor = merge_weight(lse, joined);
      lse = joined;
    }
    if (stores && params.lse != nullptr) params.lse[lse_index] = lse;
    return factor;
  }

  // Two neighbouring columns, the first of them even.
  __device__ __forceinline__ void store(const DecodeParams& params, int col, float o0,
                                        float o1) const {
    if constexpr (kWide) {
      *reinterpret_cast<float2*>(out + col) = {o0, o1};
    } else {
      *reinterpret_cast<uint32_t*>(out + col) = params.dtype == DType::kFp16
                                                    ? ptx::pack<__half>(o0, o1)
                                                    : ptx::pack<__nv_bfloat16>(o0, o1);
    }
  }
};

}  // namespace flash_attn::cuda
