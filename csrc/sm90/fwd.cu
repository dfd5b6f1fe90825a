#include "fwd.h"

#include "config.h"

namespace flash_attn::sm90 {

void run_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> {
    with_head_dim_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim, int kHeadDimV> {
      launch_fwd<kDType, kHeadDim, kHeadDimV>(params, device, stream);
    });
  });
}

}  // namespace flash_attn::sm90
