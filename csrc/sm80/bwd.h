// The backward kernels, and their instances: one a dtype and head-dim class, in inst/bwd_d*.cu;
// with score terms in inst/bwd_scores_d*.cu, of fp32 in inst/bwd_wide_d*.cu and
// inst/bwd_wide_scores_d*.cu.
#pragma once

#include "../core/params.h"
#include "../core/sequences.h"
#include "../core/tile_mask.h"
#include "../cuda/device.h"

namespace flash_attn::sm80 {

// fp16 and bf16 with any head_dim and head_dim_v up to 512 that are multiples of 8, kFp32 and kTf32
// with those up to 256. The larger half of either range takes the shared memory of sm_90.
void run_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// The same with a mask whose hidden tiles are skipped, with 163 KB of shared memory a thread block.
// fp16 and bf16 up to 256, dense, with no score terms, not deterministic.
void run_bwd_masked(const Masked<BwdParams>& params, Stream stream);
// dK, dV and dQ of some sequences, from delta, with score terms: dq_accum is null. fp16 and bf16 up
// to 256.
void run_bwd_of_sequences(const OfSequences<BwdParams>& params, Stream stream);
// dbias of the forms kWhole and kShared alone, from delta. fp16 and bf16.
void run_bwd_bias(const BwdParams& params, Stream stream);
// dq, from the sums that parts of the call have left in dq_accum (BwdParams::is_part).
void run_bwd_dq_of_parts(const BwdParams& params, Stream stream);
// BwdParams::dq_accum_cols, of run_bwd or run_bwd_masked.
int bwd_dq_accum_cols(const BwdParams& params, bool masked);

// dK, dV, and either the sums in dq_accum or, if that is null, dQ itself.
template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// fp32, as it is or by TF32.
template <DType kDType, int kHeadDim, bool kScoreTerms>
void launch_bwd_wide(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_bias(const BwdParams& params, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_with_scores(const OfSequences<BwdParams>& params, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_masked(const Masked<BwdParams>& params, Stream stream);
// Head dims above 256.
template <DType kDType, bool kScoreTerms>
void launch_bwd_large_head(const BwdParams& params, Stream stream);

}  // namespace flash_attn::sm80
