#include <c10/util/Exception.h>

#include "../cuda/cache/append.h"
#include "cache_call.h"
#include "overlap.h"

namespace flash_attn {
namespace {

void check_places(const char* name, const at::Tensor& cache) {
  TORCH_CHECK(strides_nest(cache), "flash_attn: ", name,
              ": expected one place in memory for each element, as it is updated in place, got "
              "strides ",
              cache.strides());
}

}  // namespace

void check_writable(const KvcacheArgs& args) {
  if (args.k.numel() == 0) return;
  check_places("k_cache", args.decode.k_cache);
  check_places("v_cache", args.decode.v_cache);
  TORCH_CHECK(!share_memory(args.decode.k_cache, args.decode.v_cache),
              "flash_attn: v_cache: expected memory of its own, as both caches are updated in "
              "place, got memory of k_cache");
}

bool appends_in_place(const DecodeArgs& args) {
  return is_readable(args.k_cache) && is_readable(args.v_cache);
}

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
