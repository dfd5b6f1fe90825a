// The choice of a backend on GPUs that are not here, as a C interface for tests/test_choice.py.
#include <string>

#include "../bindings/families.h"

namespace flash_attn::tests {
namespace {

DType dtype_from_name(std::string_view name) {
  if (name == "fp8") return DType::kFp8E4M3;
  if (name == "int8") return DType::kInt8;
  return name == "fp32" ? DType::kFp32 : DType::kFp16;
}

int smem_optin_bytes(int compute_capability) {
  if (compute_capability == 80) return 163 * 1024;
  return (compute_capability == 90 || compute_capability == 100 ? 227 : 99) * 1024;
}

}  // namespace
}  // namespace flash_attn::tests

#define FLASH_ATTN_EXPORT extern "C" __attribute__((visibility("default")))

FLASH_ATTN_EXPORT int flash_attn_code_for(const char* archs, int compute_capability) {
  return flash_attn::Architectures(archs).code_for(compute_capability);
}

// "backend; plan: reasons of the fastest backend that was possible" for a call on a GPU with
// 132 multiprocessors, by a build for `archs`. op: of Op. dtype: of q.
FLASH_ATTN_EXPORT const char* flash_attn_choose(const char* archs, int compute_capability, int op,
                                                const char* dtype, const char* cache_dtype,
                                                int head_dim, int tokens, bool softcap,
                                                bool return_probs) {
  using namespace flash_attn;
  static thread_local std::string answer;
  const Architectures compiled(archs);
  const DeviceInfo device = {.compute_capability = compute_capability,
                             .num_sms = 132,
                             .smem_optin_bytes = tests::smem_optin_bytes(compute_capability)};
  const CallShape call = {.op = static_cast<Op>(op),
                          .device = &device,
                          .compiled = &compiled,
                          .dtype = tests::dtype_from_name(dtype),
                          .head_dim = head_dim,
                          .head_dim_v = head_dim,
                          .softcap = softcap,
                          .return_probs = return_probs,
                          .cache_dtype = tests::dtype_from_name(cache_dtype),
                          .batch = 8,
                          .tokens = tokens,
                          .heads_q = 32,
                          .heads_kv = 8,
                          .capacity = 8192};
  const Plan plan = plan_call(families(), call, std::nullopt);
  answer = std::string(name(plan.backend)) + "; " + describe(plan) + ": " +
           join(why_not_faster(families(), call), "; ");
  return answer.c_str();
}
