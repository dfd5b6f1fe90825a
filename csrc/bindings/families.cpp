#include "families.h"

#include <limits>

#include "../cuda/decode/capability.h"
#include "../sm80/capability.h"
#include "../sm90/capability.h"

namespace flash_attn {
namespace {

// Every call, on any device.
const KernelFamily kAtenFamily = {
    .backend = Backend::kAten,
    .why_not_op = [](Op) -> std::string_view { return ""; },
    .refuse_here = [](Reasons&, const CallShape&) {},
    .refuse_call = [](Reasons&, const CallShape&) {},
    .cost = [](const CallShape&) { return std::numeric_limits<double>::infinity(); },
    .plan = [](const CallShape&) { return Plan{}; }};

}  // namespace

Families families() {
  static const KernelFamily all[] = {sm90::kFamily, sm80::kFamily, cuda::kDecodeFamily,
                                     kAtenFamily};
  return all;
}

}  // namespace flash_attn
