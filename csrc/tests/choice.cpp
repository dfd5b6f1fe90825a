// The choice of a backend on GPUs that are not here, as a C interface for tests/test_choice.py and
// benchmarks/support.py.
#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "../bindings/families.h"
#include "../core/divisor.h"

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
  constexpr std::pair<std::string_view, DType> kNames[] = {
      {"fp16", DType::kFp16}, {"bf16", DType::kBf16},   {"fp32", DType::kFp32},
      {"fp64", DType::kFp64}, {"fp8", DType::kFp8E4M3}, {"int8", DType::kInt8}};
  for (const auto& [known, dtype] : kNames) {
    if (known == name) return dtype;
  }
  throw std::invalid_argument(std::string(name));
}

// Sets the fields that `features` names, with commas between.
void ask_for(CallShape& call, std::string_view features) {
  constexpr std::pair<std::string_view, bool CallShape::*> kFields[] = {
      {"bias", &CallShape::bias},
      {"alibi", &CallShape::alibi},
      {"softcap", &CallShape::softcap},
      {"dropout", &CallShape::dropout},
      {"sink", &CallShape::sink},
      {"dense_bias", &CallShape::dense_bias},
      {"tile_mask", &CallShape::tile_mask},
      {"bool_mask", &CallShape::bool_mask},
      {"ragged", &CallShape::ragged},
      {"gathers", &CallShape::gathers},
      {"return_probs", &CallShape::return_probs},
      {"max_logits", &CallShape::max_logits},
      {"deterministic", &CallShape::deterministic},
      {"bias_gradient", &CallShape::bias_gradient},
      {"bias_of_keys", &CallShape::bias_of_keys},
      {"paged", &CallShape::paged},
      {"odd_pages", &CallShape::odd_pages},
      {"batch_invariant", &CallShape::batch_invariant},
      {"appends", &CallShape::appends},
      {"rotates", &CallShape::rotates},
      {"values_in_keys", &CallShape::values_in_keys},
      {"shares_prefix", &CallShape::shares_prefix}};
  while (!features.empty()) {
    const std::string_view name = features.substr(0, features.find(','));
    features.remove_prefix(std::min(name.size() + 1, features.size()));
    bool known = false;
    for (const auto& [field, member] : kFields) {
      if (field == name) known = call.*member = true;
    }
    if (!known) throw std::invalid_argument(std::string(name));
  }
}

int smem_optin_bytes(int compute_capability) {
  if (compute_capability == 80) return 163 * 1024;
  return (compute_capability == 90 || compute_capability / 10 == 10 ? 227 : 99) * 1024;
}

DeviceInfo device_of(int compute_capability, int num_sms) {
  return {.compute_capability = compute_capability,
          .num_sms = num_sms,
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

// "backend; plan: reasons of the fastest backend that was possible" for a call by a build for
// `archs`, on a GPU of num_sms multiprocessors, or without one (compute_capability 0). op: of Op.
// batch, heads_q, heads_kv: 0 for those of call_of(). features: names of fields of CallShape. What
// is not known: "unknown NAME".
FLASH_ATTN_EXPORT const char* flash_attn_choose(const char* archs, int compute_capability,
                                                int num_sms, int op, const char* dtype,
                                                const char* cache_dtype, int head_dim, int tokens,
                                                int capacity, int batch, int heads_q, int heads_kv,
                                                const char* features) {
  using namespace flash_attn;
  static thread_local std::string answer;
  const Architectures compiled(archs);
  const DeviceInfo device = tests::device_of(compute_capability, num_sms);
  CallShape call = tests::call_of(compiled, device, op, head_dim, tokens);
  if (compute_capability == 0) call.device = nullptr;
  call.capacity = capacity;
  if (batch > 0) call.batch = batch;
  if (heads_q > 0) call.heads_q = heads_q;
  if (heads_kv > 0) call.heads_kv = heads_kv;
  try {
    call.dtype = tests::dtype_from_name(dtype);
    call.cache_dtype = tests::dtype_from_name(cache_dtype);
    tests::ask_for(call, features);
  } catch (const std::invalid_argument& error) {
    answer = std::string("unknown ") + error.what();
    return answer.c_str();
  }
  // Seven columns of eight, in whole chunks, as flash_attn/cli/support.py has them.
  if (call.values_in_keys) call.head_dim_v = head_dim - head_dim / 64 * 8;
  const Plan plan = plan_call(families(), call, std::nullopt);
  answer = std::string(name(plan.backend)) + "; " + describe(plan) + ": " +
           join(why_not_faster(families(), call), "; ");
  return answer.c_str();
}

// Into how many pieces a varlen forward's keys are cut beside decode of short sequences, on a GPU of
// 132 multiprocessors.
FLASH_ATTN_EXPORT int flash_attn_pieces_beside_decode(const char* archs, int heads_q, int heads_kv,
                                                      int head_dim, int tokens, int keys,
                                                      double decode_time) {
  using namespace flash_attn;
  const Architectures compiled(archs);
  const DeviceInfo device = tests::device_of(90, 132);
  CallShape call =
      tests::call_of(compiled, device, static_cast<int>(Op::kForward), head_dim, tokens);
  call.ragged = true;
  call.batch = 1;
  call.heads_q = heads_q;
  call.heads_kv = heads_kv;
  call.capacity = call.longest = keys;
  call.decode_time = decode_time;
  return plan_call(families(), call, std::nullopt).splits.count;
}

FLASH_ATTN_EXPORT int flash_attn_divide(int n, int divisor) {
  return flash_attn::Divisor(divisor).divide(n);
}

// How often the plan of such a call asks for memory; -1: not counted, as this library is not
// preloaded.
FLASH_ATTN_EXPORT long flash_attn_allocations_of_plan(const char* archs, int compute_capability,
                                                      int op, int head_dim, int tokens) {
  using namespace flash_attn;
  const Architectures compiled(archs);
  const DeviceInfo device = tests::device_of(compute_capability, 132);
  const CallShape call = tests::call_of(compiled, device, op, head_dim, tokens);
  const long before = allocations;
  ::operator delete(::operator new(1));
  if (allocations == before) return -1;
  const long start = allocations;
  plan_call(families(), call, std::nullopt);
  return allocations - start;
}
