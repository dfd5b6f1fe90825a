#include "backend.h"

#include <algorithm>
#include <stdexcept>

namespace flash_attn {
namespace {

bool can_here(const KernelFamily& family, const CallShape& call) {
  Reasons reasons(/*in_words=*/false);
  if (!family.why_not_op(call.op).empty()) return false;
  family.refuse_here(reasons, call);
  return reasons.empty();
}

bool can_serve(const KernelFamily& family, const CallShape& call) {
  Reasons reasons(/*in_words=*/false);
  family.refuse_call(reasons, call);
  return reasons.empty() && can_here(family, call);
}

CallShape without_options(const CallShape& call) {
  return {.op = call.op,
          .device = call.device,
          .compiled = call.compiled,
          .dtype = call.dtype,
          .head_dim = call.head_dim,
          .head_dim_v = call.head_dim_v,
          .cache_dtype = call.cache_dtype,
          .batch = call.batch,
          .tokens = call.tokens,
          .heads_q = call.heads_q,
          .heads_kv = call.heads_kv,
          .capacity = call.capacity};
}

// The first of the cheapest for which can(family) holds, or null.
template <typename Can>
const KernelFamily* cheapest(Families families, const CallShape& call, const Can& can) {
  const KernelFamily* best = nullptr;
  for (const KernelFamily& family : families) {
    if (can(family) && (best == nullptr || family.cost(call) < best->cost(call))) best = &family;
  }
  return best;
}

}  // namespace

std::string_view name(Backend backend) {
  switch (backend) {
    case Backend::kSm90:
      return "sm90";
    case Backend::kSm80:
      return "sm80";
    case Backend::kCuda:
      return "cuda";
    case Backend::kAten:
      return "aten";
  }
  return "unknown";
}

Backend backend_from_name(Families families, std::string_view wanted) {
  std::vector<std::string> names;
  for (const KernelFamily& family : families) {
    if (name(family.backend) == wanted) return family.backend;
    names.emplace_back(name(family.backend));
  }
  throw std::invalid_argument("flash_attn: backend: expected one of " + join(names, ", ") +
                              ", got " + std::string(wanted));
}

std::vector<std::string> why_not(const KernelFamily& family, const CallShape& call) {
  Reasons reasons;
  const std::string_view no_kernels = family.why_not_op(call.op);
  reasons.refuse_if(!no_kernels.empty(), no_kernels);
  family.refuse_here(reasons, call);
  family.refuse_call(reasons, call);
  return std::move(reasons).take();
}

Plan plan_call(Families families, const CallShape& call, std::optional<std::string_view> forced) {
  const KernelFamily* chosen = nullptr;
  if (forced) {
    const Backend backend = backend_from_name(families, *forced);
    chosen = &*std::find_if(families.begin(), families.end(),
                            [&](const KernelFamily& family) { return family.backend == backend; });
    if (const auto reasons = why_not(*chosen, call); !reasons.empty()) {
      throw std::invalid_argument("flash_attn: backend: " + std::string(*forced) +
                                  " cannot serve this call: " + join(reasons, "; "));
    }
  } else {
    chosen = cheapest(families, call,
                      [&](const KernelFamily& family) { return can_serve(family, call); });
  }
  Plan plan = chosen->plan(call);
  plan.backend = chosen->backend;
  plan.device = call.device;
  return plan;
}

std::vector<std::string> why_not_faster(Families families, const CallShape& call) {
  const Families others = families.first(families.size() - 1);
  const auto here = [&](const KernelFamily& family) { return can_here(family, call); };
  // Who serves the call without its options lacks one of them, which the caller may want to know.
  const CallShape plain = without_options(call);
  const KernelFamily* possible = cheapest(others, call, [&](const KernelFamily& family) {
    return here(family) && can_serve(family, plain);
  });
  if (possible == nullptr) possible = cheapest(others, call, here);
  if (possible != nullptr) return why_not(*possible, call);
  // None: then what the most portable one lacks.
  for (auto family = others.rbegin(); family != others.rend(); ++family) {
    if (family->why_not_op(call.op).empty()) return why_not(*family, call);
  }
  return {};
}

std::string describe(const Plan& plan) {
  if (plan.backend == Backend::kAten) return "ATen operations";
  constexpr std::string_view kNames[] = {"fwd", "bwd", "decode", "kvcache", "latent"};
  static_assert(std::size(kNames) == static_cast<size_t>(Kernel::kLatent) + 1);
  std::string text(kNames[static_cast<int>(plan.kernel)]);
  const Splits& splits = plan.splits;
  if (plan.skips_tiles) text += ", the mask's hidden tiles skipped";
  if (plan.tile_tokens > 0) text += ", tiles shared by heads";
  if (plan.lists_tiles) text += ", tiles of unlike sequences listed";
  if (plan.max_logits_apart) text += ", the largest logits in a call of their own";
  if (splits.keys > 0) {
    text += ", each sequence in pieces of about " + std::to_string(splits.keys) + " keys";
  } else if (splits.count == 0) {
    text += ", the keys of all sequences dealt out evenly";
  } else if (splits.count > 1) {
    text += ", each sequence in " + std::to_string(splits.count) + " pieces";
  }
  if (plan.prefix_pieces > 0) {
    text += ", shared keys read once, in pieces: " + std::to_string(plan.prefix_pieces);
  }
  return text;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string joined;
  for (const std::string& part : parts) {
    if (!joined.empty()) joined += separator;
    joined += part;
  }
  return joined;
}

}  // namespace flash_attn
