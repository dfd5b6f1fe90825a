#include "capability.h"

#include <algorithm>
#include <limits>
#include <string>

#include "../cuda/capability.h"
#include "../cuda/decode/plan.h"
#include "bwd_config.h"
#include "large_head.h"

namespace flash_attn::sm80 {
namespace {

std::string_view why_not_op(Op) { return ""; }

void refuse_here(Reasons& reasons, const CallShape& call) {
  cuda::refuse_without_gpu(reasons, call);
  cuda::refuse_without_code(reasons, call);
}

void refuse_float32(Reasons& reasons, const CallShape& call) {
  const bool small =
      call.device != nullptr && smem_budget(call.device->smem_optin_bytes) != SmemBudget::kLargest;
  const bool wide = std::max(call.head_dim, call.head_dim_v) > kBwdWidePortableHeadDim;
  reasons.refuse_if(call.op == Op::kBackward && small && wide, [&] {
    return "the backward in float32 above head_dim " + std::to_string(kBwdWidePortableHeadDim) +
           " needs a GPU with 227 KB of shared memory a thread block";
  });
}

// Head dims up to kLargeHeadDim, in fp32 to kMaxHeadDim, and what the kernels above kMaxHeadDim
// lack.
void refuse_head_dims(Reasons& reasons, const CallShape& call) {
  if (call.dtype == DType::kFp32) return cuda::refuse_head_dims(reasons, call, kMaxHeadDim);
  cuda::refuse_head_dims(reasons, call, kLargeHeadDim);
  if (!is_large_head(call.head_dim, call.head_dim_v)) return;
  const bool backward = call.op == Op::kBackward;
  const SmemBudget needed = backward ? SmemBudget::kLargest : SmemBudget::kLarge;
  const bool lacks_it =
      call.device != nullptr && smem_budget(call.device->smem_optin_bytes) < needed;
  reasons.refuse_if(lacks_it, [&] {
    return std::string(backward ? "the backward" : "the forward") + " above head_dim " +
           std::to_string(kMaxHeadDim) + " needs a GPU with " +
           std::to_string(smem_bytes(needed) / 1024) + " KB of shared memory a thread block";
  });
}

void refuse_call(Reasons& reasons, const CallShape& call) {
  cuda::refuse_dtype_of_three(reasons, call);
  refuse_head_dims(reasons, call);
  if (call.op == Op::kDecode) return cuda::refuse_cache_of_forward(reasons, call);
  if (call.dtype == DType::kFp32) refuse_float32(reasons, call);
  reasons.refuse_if(call.paged, "a block_table is copied first, not read in place");
  reasons.refuse_if(call.return_probs, "return_attn_probs is not supported");
}

// Whether the kernels that skip the hidden tiles of a mask serve the call.
bool skips_tiles(const CallShape& call) {
  const bool has_terms = call.alibi || call.softcap || call.dropout;
  const bool backward = call.op == Op::kBackward;
  const bool small = call.device == nullptr ||
                     bwd_smem_budget(call.device->smem_optin_bytes) != SmemBudget::kLarge;
  return call.tile_mask && call.dtype != DType::kFp32 && !has_terms && !call.ragged &&
         !is_large_head(call.head_dim, call.head_dim_v) &&
         !(backward && (call.deterministic || small));
}

double cost_of_decode(const CallShape& call) {
  constexpr double kTile = 4.75;               // a tile's time, in blocks of decode's
  constexpr double kLaunch = 3.6, kStart = 4;  // µs
  if (cuda::has_few_tokens(call)) return std::numeric_limits<double>::infinity();
  const cuda::ForwardTile tile = {.launch_time = kLaunch,
                                  .key_time = kTile * cuda::decode_key_time(call),
                                  .start_time = kStart,
                                  .two_an_sm = false,
                                  .copies_pages = true};
  return cuda::forward_time(call, tile, 1);
}

double cost(const CallShape& call) {
  if (call.op == Op::kDecode) return cost_of_decode(call);
  return call.tile_mask && !skips_tiles(call) ? 2 * cuda::kReadMaskCost : 0;
}

Plan plan(const CallShape& call) {
  if (call.op == Op::kDecode) return cuda::plan_forward_on_cache(call, 1);
  return {.kernel = call.op == Op::kForward ? Kernel::kFwd : Kernel::kBwd,
          .skips_tiles = skips_tiles(call),
          .max_logits_apart = call.max_logits && cuda::changes_logits(call)};
}

}  // namespace

const KernelFamily kFamily = {.backend = Backend::kSm80,
                              .why_not_op = why_not_op,
                              .refuse_here = refuse_here,
                              .refuse_call = refuse_call,
                              .cost = cost,
                              .plan = plan};

}  // namespace flash_attn::sm80
