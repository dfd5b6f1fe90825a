#include "capability.h"

#include <algorithm>
#include <string>

#include "../capability.h"
#include "kvcache_config.h"
#include "plan.h"

namespace flash_attn::cuda {
namespace {

std::string_view why_not_op(Op op) {
  return op == Op::kDecode ? "" : "it serves decode and forwards of few queries only";
}

void refuse_here(Reasons& reasons, const CallShape& call) {
  if (call.op != Op::kDecode) return;
  refuse_without_gpu(reasons, call);
  refuse_without_code(reasons, call);
}

void refuse_call(Reasons& reasons, const CallShape& call) {
  if (call.op != Op::kDecode) return;
  refuse_dtype_of_three(reasons, call);
  refuse_head_dims(reasons, call, kvcache_most_head_dim(call.cache_dtype));
  const int64_t head_dim = std::max(call.head_dim, call.head_dim_v);
  const int smem_kib = kvcache_smem_kib(head_dim);
  const bool is_large = head_dim > kKvcachePortableHeadDim && call.device != nullptr;
  reasons.refuse_if(is_large && call.device->smem_optin_bytes < smem_kib * 1024, [&] {
    return "a head_dim of " + std::to_string(head_dim) + " needs a GPU with " +
           std::to_string(smem_kib) + " KB of shared memory a thread block";
  });
  refuse_cache(reasons, call);
  reasons.refuse_if(call.dtype == DType::kFp32 && call.cache_dtype != DType::kFp32,
                    "a cache of 8 bits in float32 is not supported");
}

double cost(const CallShape& call) { return is_for_decode(call) ? 0 : decode_time(call); }

}  // namespace

const KernelFamily kDecodeFamily = {.backend = Backend::kCuda,
                                    .why_not_op = why_not_op,
                                    .refuse_here = refuse_here,
                                    .refuse_call = refuse_call,
                                    .cost = cost,
                                    .plan = plan_decode};

}  // namespace flash_attn::cuda
