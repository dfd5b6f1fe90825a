// The backward's small kernels, and the order of its launches, which serve every architecture.
#pragma once

#include "attn/dq_accum.cuh"
#include "bwd.h"
#include "launch.h"

namespace flash_attn::cuda {

// dsink, from delta.
void run_bwd_sink(const BwdParams& params, Stream stream);

// dbias of the form kRows, from delta.
void run_bwd_bias_rows(const BwdParams& params, Stream stream);

// dq = softmax_scale · dropout's scale · dq_accum.
void run_bwd_convert_dq(const BwdParams& params, DqAccumOrder order, Stream stream);

// The order that the portable code for this device adds in.
DqAccumOrder portable_dq_accum_order();

// delta, dsink, sums of rows; launch_products(), which writes dk, dv, other forms of dbias and adds
// to dq_accum in this order; dq, unless the call is a part. Without dq_accum, or with a pool,
// launch_products() writes dq, too.
template <typename F>
void run_bwd_steps(const BwdParams& params, DqAccumOrder order, Stream stream,
                   F&& launch_products) {
  run_bwd_delta(params, stream);
  if (params.dsink != nullptr) run_bwd_sink(params, stream);
  if (params.dbias.form == BiasGradientParams::Form::kRows) run_bwd_bias_rows(params, stream);
  launch_products();
  const bool has_dq = params.dq_accum == nullptr || params.dq_pool.places > 0;
  if (!has_dq && !params.is_part) run_bwd_convert_dq(params, order, stream);
}

}  // namespace flash_attn::cuda
