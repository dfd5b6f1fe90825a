// What decode, the append and the forward against a cache share: the call as kernels read it.
#pragma once

#include "to_params.h"

namespace flash_attn {

// Tensors in place where that is possible, else copies.
DecodeArgs kernel_args(DecodeArgs args);

// args: of kernel_args. tokens: appended by this call, on the same stream; or null.
CacheParams cache_params(const DecodeArgs& args, const KvcacheArgs* tokens);
// All but the workspace.
DecodeParams decode_params(const Plan& plan, const DecodeArgs& args, const CacheParams& cache,
                           const DecodeResult& results);

// Whether the append kernel can write to the caches as they lie.
bool appends_in_place(const DecodeArgs& args);
// What the append is going to write to: one place in memory for each element of both caches.
void check_writable(const KvcacheArgs& args);
// The tokens into the caches, in place.
void append(const CacheParams& cache, const KvcacheArgs& tokens);

// Many new tokens on a forward kernel, which reads K and V once for 64 to 192 of them. params: with
// its workspace.
void prefill(const Plan& plan, const DecodeArgs& args, DecodeParams& params,
             const DecodeResult& results);

}  // namespace flash_attn
