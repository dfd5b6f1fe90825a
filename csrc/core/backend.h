// How a call is served, and why other backends do not serve it. The one place that decides. What a
// backend can do, and what a call costs it, stands beside its kernels; here they are compared.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan.h"

namespace flash_attn {

// What a backend says of itself.
struct KernelFamily {
  Backend backend;
  // Empty: it has kernels for the op.
  std::string_view (*why_not_op)(Op op);
  // What this build and this device lack; and then what the call asks for that the kernels cannot.
  void (*refuse_here)(Reasons& reasons, const CallShape& call);
  void (*refuse_call)(Reasons& reasons, const CallShape& call);
  // Estimated time of the call, in a unit that all families share. Infinite: for want of any other.
  double (*cost)(const CallShape& call);
  // How it serves a call that it can serve.
  Plan (*plan)(const CallShape& call);
};
// Of equal cost, the first is taken. The last serves everything.
using Families = std::span<const KernelFamily>;

std::string_view name(Backend backend);
// Throws std::invalid_argument that lists the names.
Backend backend_from_name(Families families, std::string_view name);

// Every reason why a backend cannot serve the call; empty: it can.
std::vector<std::string> why_not(const KernelFamily& family, const CallShape& call);

// Of the cheapest backend that serves the call; of the one named, if any, or std::invalid_argument
// with its reasons.
Plan plan_call(Families families, const CallShape& call, std::optional<std::string_view> forced);

// Of a call that is left to the last backend: the reasons of the one that would be the cheapest, if
// any, on this build and device.
std::vector<std::string> why_not_faster(Families families, const CallShape& call);

// "decode, each sequence in 12 pieces"
std::string describe(const Plan& plan);

std::string join(const std::vector<std::string>& parts, std::string_view separator);

}  // namespace flash_attn
