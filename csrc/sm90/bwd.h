// The backward kernels, and their instances for both dtypes by head-dim class: plain in inst/bwd_d*.cu,
// with tiles that are split in inst/bwd_split_d*.cu, with score terms in inst/bwd_scores_d*.cu, with some of
// them in inst/bwd_some_terms_d*.cu, with a mask whose hidden tiles are passed over in inst/bwd_masked_d*.cu.
#pragma once

#include "../core/params.h"
#include "../core/tile_mask.h"
#include "../cuda/device.h"

namespace flash_attn::sm90 {

// Compute capability 9.0 only. Any head_dim and head_dim_v up to 256 that are multiples of 8, fp16 and
// bf16. Up to kBwdMaxSingleHeadDim: score terms. Where dq_turns is given, deterministic, without them. Of the
// gradient of a bias those forms that stores_bias_gradient(), and kRows.
void run_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
bool stores_bias_gradient(const BwdParams& params);
// The gradient of a bias of the forms kWhole and kShared, behind run_bwd(), where computes_bias_gradient().
// It writes each place of the gradient, also those that nobody sees.
void run_bwd_bias(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
bool computes_bias_gradient(const BwdParams& params);
// With a mask whose hidden tiles are passed over. Head dims up to 128, dense, no score terms, neither
// deterministic nor with a pool.
void run_bwd_masked(const Masked<BwdParams>& params, const cuda::DeviceInfo& device, Stream stream);
// BwdParams::dq_accum_cols. masked: of run_bwd_masked().
int bwd_dq_accum_cols(const BwdParams& params, bool masked);
// DqPool::places for this call; 0: dq_accum has room for all sums. A pool wants dq_accum_rows of
// bwd_dq_pool_rows().
int bwd_dq_pool_places(const BwdParams& params, const cuda::DeviceInfo& device);
int64_t bwd_dq_pool_rows(const BwdParams& params);

// BwdSplits for this call, without the workspace; params.splits, if there are several.
BwdSplits bwd_splits(const BwdParams& params, const cuda::DeviceInfo& device);
// Numbers of BwdSplits::sums and BwdSplits::arrived.
int64_t bwd_split_sums(const BwdParams& params);
int64_t bwd_split_arrivals(const BwdParams& params);
// Whether dk and dv may be fp32.
bool writes_wide_key_gradients(const BwdParams& params);

// dK, dV, and the sums in dq_accum.
template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_split(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_with_scores(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// ALiBi, a bias (broadcasts_queries() or can_stage_bias()), or both; or softcap, or dropout, alone.
template <DType kDType, int kHeadDim>
void launch_bwd_with_some_terms(const BwdParams& params, const cuda::DeviceInfo& device,
                                Stream stream);
// Where computes_bias_gradient().
template <DType kDType, int kHeadDim>
void launch_bwd_bias(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_masked(const Masked<BwdParams>& params, const cuda::DeviceInfo& device,
                       Stream stream);
template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd_pair(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);

}  // namespace flash_attn::sm90
