// What decode, the append and the forward against a cache share: the call as kernels read it.
#pragma once

#include "to_params.h"

namespace flash_attn {

struct CacheCall {
  DecodeArgs args;     // tensors in place where that is possible, else copies
  CacheParams params;  // of these
};
// tokens: appended by this call, on the same stream; or null.
CacheCall cache_call(const CallShape& shape, const DecodeArgs& given, const KvcacheArgs* tokens);

// The op decode, of a plan for kernels.
DecodeResult decode_planned(const CallShape& shape, const Plan& plan, const DecodeArgs& args);

// The tokens into the caches, in place.
void append(const CacheParams& cache, const KvcacheArgs& tokens);

// Many new tokens on a forward kernel, which reads K and V once for 64 to 192 of them. params: with
// its workspace.
void prefill(const Plan& plan, const DecodeArgs& args, DecodeParams& params,
             const DecodeResult& results);

}  // namespace flash_attn
