// The backward kernels, and their instances for both dtypes by head-dim class. Plain ones stand in
// inst/bwd_d*.cu, those whose tiles are split in inst/bwd_split_d*.cu, those with score terms in
// inst/bwd_scores_d*.cu, and those with some of the terms in inst/bwd_some_terms_d*.cu. Those with
// a mask whose hidden tiles are passed over stand in inst/bwd_masked_d*.cu, and those that compute
// dQ apart in inst/bwd_dq_apart_d*.cu.
#pragma once

#include "../core/params.h"
#include "../core/tile_mask.h"
#include "../cuda/device.h"
#include "mask_order.h"

namespace flash_attn::sm90 {

// It runs on compute capability 9.0 only, in fp16 and bf16. head_dim and head_dim_v may be any
// multiples of 8 up to 256. Score terms are served up to kBwdMaxSingleHeadDim. Where dq_turns is
// given, the call is deterministic and has no score terms. dq_accum is null where
// computes_dq_apart(), and then so is dq_turns. The gradient of a bias is computed in
// the form kRows, and in others where stores_bias_gradient().
void run_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// dq, from the sums that parts of the call have left in dq_accum (BwdParams::is_part).
void run_bwd_dq_of_parts(const BwdParams& params, Stream stream);
bool stores_bias_gradient(const BwdParams& params);
// Computes the gradient of a bias of the forms kWhole and kShared, behind run_bwd(), where
// computes_bias_gradient(). It writes each element of the gradient, also those that nobody sees.
void run_bwd_bias(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
bool computes_bias_gradient(const BwdParams& params);
// The backward with a mask whose hidden tiles are passed over. The call is dense, has no score
// terms, and is not deterministic. order is room for mask_order_size() numbers.
void run_bwd_masked(const Masked<BwdParams>& params, int32_t* order, const cuda::DeviceInfo& device,
                    Stream stream);
// Whether a kernel of its own computes dQ, without sums in memory; the bits of all gradients are
// the same every time.
bool computes_dq_apart(const BwdParams& params, const cuda::DeviceInfo& device);
// What BwdParams::dq_accum_cols has to be. masked: whether run_bwd_masked() is called.
int bwd_dq_accum_cols(const BwdParams& params, bool masked);
// The pool of this call, without its workspace. Without places there is none, and dq_accum has room
// for all sums. A pool wants dq_accum_rows of bwd_dq_pool_rows(). masked: as above; then there is
// one up to kBwdMaxSingleHeadDim.
DqPool bwd_dq_pool(const BwdParams& params, const cuda::DeviceInfo& device, bool masked);
int64_t bwd_dq_pool_rows(const BwdParams& params, const DqPool& pool);

// The splits of this call, without their workspace. If there are several, they belong into
// params.splits.
BwdSplits bwd_splits(const BwdParams& params, const cuda::DeviceInfo& device);
// Whether dk and dv may be fp32.
bool writes_wide_key_gradients(const BwdParams& params);

// These compute dK, dV, and the sums in dq_accum, or without it dQ.
template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_split(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_with_scores(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// It serves ALiBi, a bias (broadcasts_queries() or can_stage_bias()), or both; or softcap alone, or
// dropout alone.
template <DType kDType, int kHeadDim>
void launch_bwd_with_some_terms(const BwdParams& params, const cuda::DeviceInfo& device,
                                Stream stream);
// It may be called where computes_bias_gradient().
template <DType kDType, int kHeadDim>
void launch_bwd_bias(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_masked(const Masked<BwdParams>& params, const MaskOrder& order,
                       const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_dq_apart(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_bwd_pair_masked(const Masked<BwdParams>& params, const MaskOrder& order,
                            const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd_pair(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);

}  // namespace flash_attn::sm90
