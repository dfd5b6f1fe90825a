// The forward kernels, and their instances: one a dtype and head-dim class, in inst/fwd_d*.cu; with
// score terms in inst/fwd_scores_d*.cu, of fp32 in inst/fwd_wide_d*.cu and
// inst/fwd_wide_scores_d*.cu.
#pragma once

#include "../core/params.h"
#include "../core/sequences.h"
#include "../core/tile_mask.h"
#include "../cuda/device.h"

namespace flash_attn::sm80 {

// fp16 and bf16 with any head_dim and head_dim_v up to 512 that are multiples of 8, kFp32 and kTf32
// with those up to 256. Above 256 a thread block takes 163 KB of shared memory.
void run_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// The same with a mask whose hidden tiles are skipped. fp16 and bf16 up to 256, dense, with no
// score terms.
void run_fwd_masked(const Masked<FwdParams>& params, Stream stream);
// The same with score terms, of some sequences. fp16 and bf16 up to 256.
void run_fwd_of_sequences(const OfSequences<FwdParams>& params, Stream stream);

template <DType kDType, int kHeadDim>
void launch_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// fp32, as it is or by TF32.
template <DType kDType, int kHeadDim, bool kScoreTerms>
void launch_fwd_wide(const FwdParams& params, Stream stream);
template <DType kDType, int kHeadDim>
void launch_fwd_with_scores(const OfSequences<FwdParams>& params, Stream stream);
template <DType kDType, int kHeadDim>
void launch_fwd_masked(const Masked<FwdParams>& params, Stream stream);
// Head dims above 256; kHeadDim: 384 (without score terms) or 512.
template <DType kDType, int kHeadDim, bool kScoreTerms>
void launch_fwd_large_head(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);

}  // namespace flash_attn::sm80
