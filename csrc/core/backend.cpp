#include "backend.h"

#include <stdexcept>

namespace flash_attn {
namespace {

#ifdef FLASH_ATTN_WITH_CUDA
constexpr bool kBuiltWithCuda = true;
#else
constexpr bool kBuiltWithCuda = false;
#endif

class Reasons {
 public:
  void refuse_if(bool refused, std::string reason) {
    if (refused) reasons_.push_back(std::move(reason));
  }
  std::vector<std::string> take() { return std::move(reasons_); }

 private:
  std::vector<std::string> reasons_;
};

// What every CUDA kernel of ours asks for.
Reasons why_not_cuda(const CallShape& call) {
  Reasons reasons;
  reasons.refuse_if(!kBuiltWithCuda, "this build of flash_attn has no CUDA kernels");
  reasons.refuse_if(!call.on_cuda, "the tensors are not on a CUDA device");
  reasons.refuse_if(kBuiltWithCuda && call.on_cuda && call.compute_capability < 80,
                    "the GPU is older than compute capability 8.0");
  reasons.refuse_if(call.dtype != DType::kFp16 && call.dtype != DType::kBf16,
                    "dtype is not float16 or bfloat16");
  reasons.refuse_if(
      call.head_dim > 256 || call.head_dim_v > 256,
      "head_dim " + std::to_string(std::max(call.head_dim, call.head_dim_v)) + " is above 256");
  return reasons;
}

std::vector<std::string> why_not_decode(const CallShape& call) {
  Reasons reasons = why_not_cuda(call);
  const bool fp8 = call.cache_dtype == DType::kFp8E4M3;
  const int64_t multiple = fp8 || call.cache_dtype == DType::kInt8 ? 16 : 8;
  reasons.refuse_if(call.head_dim % multiple != 0 || call.head_dim_v % multiple != 0,
                    "a head_dim of the caches is not a multiple of " + std::to_string(multiple));
  // Older GPUs cannot widen fp8, and newer ones run code made for older ones.
  reasons.refuse_if(fp8 && kBuiltWithCuda && call.on_cuda && call.compute_capability != 90,
                    "a cache of fp8 needs a GPU of compute capability 9.0");
  // The kernels count rows, and tiles of all sequences, in 32 bits or less.
  constexpr int64_t kMaxRows = int64_t{1} << 20, kMaxKeys = int64_t{1} << 30,
                    kMaxAllKeys = int64_t{1} << 35;
  reasons.refuse_if(call.group_rows >= kMaxRows,
                    "2^20 or more rows (tokens times query heads) read one kv head");
  reasons.refuse_if(call.capacity >= kMaxKeys, "the cache has 2^30 or more places a sequence");
  reasons.refuse_if(call.batch * call.capacity >= kMaxAllKeys,
                    "the cache has 2^35 or more places for the whole batch");
  return reasons.take();
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
  if (call.op == Op::kDecode) {
    if (backend != Backend::kCuda) return {"it has no decode kernel"};
    return why_not_decode(call);
  }
  if (backend == Backend::kCuda) {
    return {"it serves flash_decode_func and flash_attn_with_kvcache only"};
  }
  Reasons reasons = why_not_cuda(call);
  if (backend == Backend::kSm80) {
    reasons.refuse_if(call.alibi, "alibi_slopes is not supported");
    reasons.refuse_if(call.softcap, "softcap is not supported");
    reasons.refuse_if(call.sink, "learnable_sink is not supported");
  }
  reasons.refuse_if(call.bias, "attn_bias is not supported");
  reasons.refuse_if(call.dropout, "dropout_p is not supported");
  reasons.refuse_if(call.return_probs, "return_attn_probs is not supported");
  if (backend == Backend::kSm90) {
    reasons.refuse_if(call.op == Op::kBackward, "it has no backward kernel");
    reasons.refuse_if(kBuiltWithCuda && call.on_cuda && call.compute_capability != 90,
                      "the GPU is not of compute capability 9.0");
  }
  return reasons.take();
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
