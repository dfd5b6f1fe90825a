// The end of a tile in the forward kernel: O and LSE on their way out.
#pragma once

#include <type_traits>

#include "fwd_consumer.cuh"

namespace flash_attn::sm90 {

// Normalises O and brings it to shared memory; writes LSE. Rows of the segment that do not count
// get 0 and -inf. The last columns that lie there, or all, are sent when the next tile is under
// way: the wait for the proxies then falls beside its first softmax.
template <typename Traits>
__device__ __forceinline__ void stage_output(const FwdWork& work, FwdConsumer<Traits>& self,
                                             typename Traits::Output& O,
                                             typename Traits::Softmax& softmax) {
  const int first_row = work.first_row + self.warp_row;  // of the warp
  const int rows_that_count = work.window.len_q() - first_row, rows = work.segment_q - first_row;
  float* const lse = work.lse + first_row;
  softmax.finish();
  const float* const sinks = self.params.score.learnable_sink;
  if (sinks != nullptr) softmax.add_sink(O, bounded_sink(sinks[work.q.head]));
  const float scale = Traits::ScorePolicy::output_scale(self.params.dropout);
  scale_rows(O, {softmax.inverse_sum(0) * scale, softmax.inverse_sum(1) * scale});
  if (rows_that_count < 16) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (fragment_row(row, self.lane) < rows_that_count) continue;
#pragma unroll
      for (int i = 0; i < O.kRowElements; ++i) O.at(row, i) = 0.f;
    }
  }
#pragma unroll
  for (int col = 0; col < Traits::VTile::kCols; col += Traits::kOutputCols) {
    if (col > 0) self.send_output(work, col - Traits::kOutputCols);
    // What was there before has been read. A warp keeps to its own rows.
    ptx::bulk_wait_read();
    __syncwarp();
#pragma unroll
    for (int slab = 0; slab < Traits::kOutputSlabs; ++slab) {
      store_rounded(self.smem.out[slab], O, col + slab * Traits::OutputSlab::kCols, self.warp_row,
                    self.lane);
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int lse_row = fragment_row(row, self.lane);
    if (self.lane % 4 == 0 && lse_row < rows) {
      lse[lse_row] = lse_row < rows_that_count ? softmax.log_sum_exp(row) : -INFINITY;
    }
  }
}

// Columns of normalised O to a row of a tensor: in fp32, or rounded to a pair of Element's.
template <typename Number, int kN>
__device__ __forceinline__ void store_row(Number* to, const Accumulator<1, kN>& O, int half,
                                          int num_cols, int lane) {
#pragma unroll
  for (int i = 0; i < O.kRowElements; i += 2) {
    const int col = fragment_col(i, lane);
    if (col >= num_cols) continue;
    const float left = O.at(half, i), right = O.at(half, i + 1);
    if constexpr (std::is_same_v<Number, float>) {
      *reinterpret_cast<float2*>(to + col) = {left, right};
    } else {
      *reinterpret_cast<uint32_t*>(to + col) = flash_attn::ptx::pack<Number>(left, right);
    }
  }
}

// Instead of stage_output(): normalised O and LSE, from the registers. Of a piece they are partial
// results in fp32; if it is the only one, they go where those of a tile go. A sink joins the first
// piece (of varlen calls, as no other call in pieces has one). Rows of the segment that do not count
// get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void store_piece(const FwdWork& work, const FwdConsumer<Traits>& self,
                                            typename Traits::Output& O,
                                            typename Traits::Softmax& softmax) {
  using Element = typename Traits::Element;
  const FwdInPieces& params = self.params;
  const int cols = params.head_dim_v;
  const int heads = (work.kv.head + 1) * (params.heads_q / params.heads_kv) - work.q.head;
  const bool is_partial = params.num_splits > 1;
  const bool varlen = params.cu_seqlens_q != nullptr;
  const int64_t partial_row = is_partial ? work.lse - params.partial.lse : 0;
  const int64_t rows_of_head = varlen ? params.total_q : params.seqlen_q;  // of partial results
  Element* const out = static_cast<Element*>(params.out) +
                       SeqlenInfo::offset(params.out_strides, work.q.batch, work.q.head,
                                          int64_t{work.q.box.last} - work.segment_q);
  softmax.finish();
  const auto head_of = [&](int half) {
    return params.packed.head(self.warp_row + fragment_row(half, self.lane));
  };
  const float* const sinks = params.score.learnable_sink;
  if (sinks != nullptr && partial_row < params.heads_q * params.total_q) {
    const auto sink = [&](int half) {  // rows of no head get any
      return bounded_sink(sinks[work.q.head + min(head_of(half), heads - 1)]);
    };
    softmax.add_sinks(O, {sink(0), sink(1)});
  }
  scale_rows(O, {softmax.inverse_sum(0), softmax.inverse_sum(1)});
  // Where heads share tiles, the sequence's last one has all rows behind it, none of which counts.
  const int tokens = params.packed.tokens();
  const bool has_rest = params.packed.share() &&
                        work.first_row + tokens >= params.packed.blocks(params.seqlen_q) * tokens &&
                        work.first_row + tokens >= work.window.len_q();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = head_of(half);
    if (head >= heads) continue;
#pragma unroll 1
    for (int query = self.query(work, half); query < work.segment_q; query += tokens) {
      const bool counts = query < work.window.len_q();
      float* const lse =
          work.lse + head * (is_partial ? rows_of_head : params.lse_head_stride) + query;
      if (self.lane % 4 == 0) *lse = counts ? softmax.log_sum_exp(half) : -INFINITY;
      if (!counts) {
#pragma unroll
        for (int i = 0; i < O.kRowElements; ++i) O.at(half, i) = 0.f;
      }
      if (is_partial) {
        store_row(params.partial.o + (lse - params.partial.lse) * cols, O, half, cols, self.lane);
      } else {
        store_row(out + head * params.out_strides.head + query * params.out_strides.row, O, half,
                  cols, self.lane);
      }
      if (!has_rest) break;
    }
  }
}

}  // namespace flash_attn::sm90
