// can_use: which backend would serve a call, and why the others would not.
#include "checks.h"
#include "families.h"
#include "few_queries.h"
#include "to_params.h"

namespace flash_attn {
namespace {

Explanation explain(const CallShape& call, OptName forced) {
  const Plan plan = plan_call(families(), call, std::nullopt);
  const Backend chosen = forced ? backend_from_name(families(), *forced) : plan.backend;
  std::map<std::string, std::string> plans;
  std::map<std::string, std::vector<std::string>> refusals;
  for (const KernelFamily& family : families()) {
    const std::string backend(name(family.backend));
    auto reasons = why_not(family, call);
    if (reasons.empty()) plans[backend] = describe(plan_call(families(), call, backend));
    // One that was named may be among those that refuse.
    if (family.backend != chosen || !reasons.empty()) refusals[backend] = std::move(reasons);
  }
  return {std::string(name(chosen)), refusals, plans};
}

}  // namespace

Explanation explain_fwd(const FwdArgs& args) {
  check(args);
  const std::optional<FewQueriesCall> few = few_queries_call(args);
  const CallShape shape = forward_shape(args, few ? &*few : nullptr);
  Explanation explanation = explain(shape, args.backend);
  if (!few) return explanation;
  const Plan whole = plan_call(families(), shape, std::nullopt);
  if (!few->serves_all && whole.lists_tiles) return explanation;
  auto& [chosen, refusals, plans] = explanation;
  if (few->serves_all) {
    const Plan& plan = few->plan;
    refusals.try_emplace(chosen);
    chosen = name(plan.backend);
    refusals.erase(chosen);
    plans[chosen] = describe(plan);
  } else if (chosen != name(Backend::kAten)) {
    plans[chosen] += ", short sequences (queries: up to " + std::to_string(few->args.q.size(1)) +
                     ") by " + std::string(name(few->plan.backend)) + ": " + describe(few->plan);
  }
  return explanation;
}

Explanation explain_bwd(const FwdArgs& args) {
  check(args);
  return explain(backward_shape(args), args.backend);
}

Explanation explain_decode(const DecodeArgs& args) {
  check(args);
  return explain(call_shape(args), args.backend);
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const KernelFamily& family : families()) names.emplace_back(name(family.backend));
  return names;
}

}  // namespace flash_attn
