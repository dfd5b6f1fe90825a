// The choice of a backend on GPUs that are not here, as a C interface for tests/test_choice.py.
#include <cstdlib>
#include <new>
#include <string>

#include "../bindings/families.h"
#include "../cuda/divisor.h"

namespace {
thread_local long allocations = 0;
}

// The process's, where this library is preloaded. Elsewhere nobody calls these.
void* operator new(std::size_t bytes) {
  ++allocations;
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

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

DeviceInfo device_of(int compute_capability) {
  return {.compute_capability = compute_capability,
          .num_sms = 132,
          .smem_optin_bytes = smem_optin_bytes(compute_capability)};
}

// Eight sequences of GQA; fp16.
CallShape call_of(const Architectures& compiled, const DeviceInfo& device, int op, int head_dim,
                  int tokens) {
  return {.op = static_cast<Op>(op),
          .device = &device,
          .compiled = &compiled,
          .head_dim = head_dim,
          .head_dim_v = head_dim,
          .batch = 8,
          .tokens = tokens,
          .heads_q = 32,
          .heads_kv = 8,
          .capacity = 8192};
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
                                                bool return_probs, int capacity, bool sink,
                                                bool appends, bool rotates) {
  using namespace flash_attn;
  static thread_local std::string answer;
  const Architectures compiled(archs);
  const DeviceInfo device = tests::device_of(compute_capability);
  CallShape call = tests::call_of(compiled, device, op, head_dim, tokens);
  call.dtype = tests::dtype_from_name(dtype);
  call.cache_dtype = tests::dtype_from_name(cache_dtype);
  call.softcap = softcap;
  call.return_probs = return_probs;
  call.capacity = capacity;
  call.sink = sink;
  call.appends = appends;
  call.rotates = rotates;
  const Plan plan = plan_call(families(), call, std::nullopt);
  answer = std::string(name(plan.backend)) + "; " + describe(plan) + ": " +
           join(why_not_faster(families(), call), "; ");
  return answer.c_str();
}

FLASH_ATTN_EXPORT int flash_attn_divide(int n, int divisor) {
  return flash_attn::cuda::Divisor(divisor).divide(n);
}

// How often the plan of such a call asks for memory; -1: not counted, as this library is not preloaded.
FLASH_ATTN_EXPORT long flash_attn_allocations_of_plan(const char* archs, int compute_capability,
                                                      int op, int head_dim, int tokens) {
  using namespace flash_attn;
  const Architectures compiled(archs);
  const DeviceInfo device = tests::device_of(compute_capability);
  const CallShape call = tests::call_of(compiled, device, op, head_dim, tokens);
  const long before = allocations;
  ::operator delete(::operator new(1));
  if (allocations == before) return -1;
  const long start = allocations;
  plan_call(families(), call, std::nullopt);
  return allocations - start;
}
