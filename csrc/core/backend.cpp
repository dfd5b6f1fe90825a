#include "backend.h"

#include <stdexcept>

namespace flash_attn {
namespace {

#ifdef FLASH_ATTN_WITH_CUDA
constexpr bool kBuiltWithCuda = true;
#else
constexpr bool kBuiltWithCuda = false;
#endif

// What every CUDA kernel of ours asks for.
std::vector<std::string> why_not_cuda(const CallShape& call) {
  std::vector<std::string> reasons;
  const auto refuse_if = [&](bool refused, std::string reason) {
    if (refused) reasons.push_back(std::move(reason));
  };
  refuse_if(!kBuiltWithCuda, "this build of flash_attn has no CUDA kernels");
  refuse_if(!call.on_cuda, "the tensors are not on a CUDA device");
  refuse_if(kBuiltWithCuda && call.on_cuda && call.compute_capability < 80,
            "the GPU is older than compute capability 8.0");
  refuse_if(call.dtype != DType::kFp16 && call.dtype != DType::kBf16,
            "dtype is not float16 or bfloat16");
  refuse_if(
      call.head_dim > 256 || call.head_dim_v > 256,
      "head_dim " + std::to_string(std::max(call.head_dim, call.head_dim_v)) + " is above 256");
  refuse_if(call.alibi, "alibi_slopes is not supported");
  refuse_if(call.softcap, "softcap is not supported");
  refuse_if(call.sink, "learnable_sink is not supported");
  return reasons;
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

Backend backend_from_name(std::string_view wanted) {
  std::vector<std::string> names;
  for (const Backend backend : kBackends) {
    if (name(backend) == wanted) return backend;
    names.emplace_back(name(backend));
  }
  throw std::invalid_argument("flash_attn: backend: expected one of " + join(names, ", ") +
                              ", got " + std::string(wanted));
}

std::vector<std::string> why_not(Backend backend, const CallShape& call) {
  if (backend == Backend::kAten) return {};
  std::vector<std::string> reasons;
  if (backend == Backend::kCuda) {
    if (call.op != Op::kDecode)
      return {"it serves flash_decode_func and flash_attn_with_kvcache only"};
    reasons = why_not_cuda(call);
    if (call.head_dim % 8 != 0) reasons.emplace_back("head_dim is not a multiple of 8");
    if (call.head_dim != call.head_dim_v) {
      reasons.emplace_back("k_cache and v_cache differ in head_dim");
    }
    if (call.cache_dtype != call.dtype) reasons.emplace_back("the cache is not of q's dtype");
    if (call.paged) reasons.emplace_back("block_table is not supported");
    if (call.batch_idx) reasons.emplace_back("cache_batch_idx is not supported");
    if (call.leftpad) reasons.emplace_back("cache_leftpad is not supported");
    if (call.batch_invariant) reasons.emplace_back("batch_invariant is not supported");
    return reasons;
  }
  if (call.op == Op::kDecode) return {"it has no decode kernel"};
  reasons = why_not_cuda(call);
  if (call.bias) reasons.emplace_back("attn_bias is not supported");
  if (call.dropout) reasons.emplace_back("dropout_p is not supported");
  if (call.return_probs) reasons.emplace_back("return_attn_probs is not supported");
  if (backend == Backend::kSm90) {
    if (call.op == Op::kBackward) reasons.emplace_back("it has no backward kernel");
    if (kBuiltWithCuda && call.on_cuda && call.compute_capability != 90) {
      reasons.emplace_back("the GPU is not of compute capability 9.0");
    }
  }
  return reasons;
}

Backend choose_backend(const CallShape& call, std::optional<std::string_view> forced) {
  if (forced) {
    const Backend backend = backend_from_name(*forced);
    if (const auto reasons = why_not(backend, call); !reasons.empty()) {
      throw std::invalid_argument("flash_attn: backend: " + std::string(*forced) +
                                  " cannot serve this call: " + join(reasons, "; "));
    }
    return backend;
  }
  for (const Backend backend : kBackends) {
    if (why_not(backend, call).empty()) return backend;
  }
  return Backend::kAten;
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
