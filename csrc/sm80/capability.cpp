#include "capability.h"

#include "../cuda/capability.h"
#include "../cuda/decode/plan.h"

namespace flash_attn::sm80 {
namespace {

std::string_view why_not_op(Op) { return ""; }

void refuse_here(Reasons& reasons, const CallShape& call) {
  cuda::refuse_without_gpu(reasons, call);
  cuda::refuse_without_code(reasons, call);
}

void refuse_call(Reasons& reasons, const CallShape& call) {
  cuda::refuse_tensors(reasons, call);
  if (call.op == Op::kDecode) return cuda::refuse_cache_of_forward(reasons, call);
  reasons.refuse_if(call.return_probs, "return_attn_probs is not supported");
}

double cost(const CallShape& call) {
  constexpr double kTileCost = 4.75;
  return call.op == Op::kDecode ? cuda::forward_cost(call, kTileCost, 1) : 0;
}

Plan plan(const CallShape& call) {
  if (call.op == Op::kDecode) return cuda::plan_forward_on_cache(call, 1);
  return {.kernel = call.op == Op::kForward ? Kernel::kFwd : Kernel::kBwd};
}

}  // namespace

const KernelFamily kFamily = {.backend = Backend::kSm80,
                              .why_not_op = why_not_op,
                              .refuse_here = refuse_here,
                              .refuse_call = refuse_call,
                              .cost = cost,
                              .plan = plan};

}  // namespace flash_attn::sm80
