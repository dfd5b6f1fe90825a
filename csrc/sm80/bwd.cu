#include "bwd.h"

#include "../cuda/bwd.h"
#include "../cuda/launch.h"
#include "bwd_config.h"

namespace flash_attn::sm80 {

int64_t bwd_dq_accum_rows(const BwdParams& params) { return params.total_q + kBwdDqAccumPadding; }

int bwd_dq_accum_cols(const BwdParams& params) {
  return with_head_dim_class(params.head_dim, params.head_dim_v,
                             [&]<int kHeadDim> { return kHeadDim; });
}

void run_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  const int dq_accum_cols = bwd_dq_accum_cols(params);
  cuda::run_bwd_delta(params, stream);
  if (params.dq_accum != nullptr) {
    const size_t floats = size_t{1} * params.heads_q * params.dq_accum_rows * dq_accum_cols;
    FLASH_ATTN_CUDA_CHECK(cudaMemsetAsync(params.dq_accum, 0, floats * sizeof(float), stream));
  }
  with_dtype(params.dtype, [&]<DType kDType> {
    with_head_dim_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
      launch_bwd<kDType, kHeadDim>(params, device, stream);
    });
  });
  if (params.dq_accum != nullptr) cuda::run_bwd_convert_dq(params, dq_accum_cols, stream);
}

}  // namespace flash_attn::sm80
