#include "../cuda/cache/append.h"
#include "cache_call.h"

namespace flash_attn {

void append(const CacheParams& cache, const KvcacheArgs& tokens) {
  const at::Tensor k = readable(tokens.k), v = readable(tokens.v);
  AppendParams params = {};
  static_cast<CacheParams&>(params) = cache;
  params.k = k.const_data_ptr();
  params.v = v.const_data_ptr();
  params.k_new_strides = strides_of(k);
  params.v_new_strides = strides_of(v);
  cuda::run_append(params, stream_of(k));
}

}  // namespace flash_attn
