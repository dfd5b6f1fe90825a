// can_use: which backend would serve a call, and why the others would not.
#include "checks.h"
#include "families.h"
#include "to_params.h"

namespace flash_attn {
namespace {

Explanation explain(const CallShape& call, OptName forced) {
  const Backend chosen = forced ? backend_from_name(families(), *forced)
                                : choose_backend(families(), call, std::nullopt);
  std::map<std::string, std::vector<std::string>> refusals;
  for (const KernelFamily& family : families()) {
    if (family.backend != chosen) {
      refusals[std::string(name(family.backend))] = why_not(family, call);
    }
  }
  return {std::string(name(chosen)), refusals};
}

}  // namespace

Explanation explain_fwd(const FwdArgs& args) {
  check(args.attn);
  return explain(call_shape(args), args.backend);
}

Explanation explain_bwd(const FwdArgs& args) {
  check(args.attn);
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
