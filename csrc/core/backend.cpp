#include "backend.h"

#include <algorithm>
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

// Rows of q that read one kv head of a sequence.
int64_t group_rows(const CallShape& call) { return call.tokens * (call.heads_q / call.heads_kv); }

// What every CUDA kernel that reads a cache asks for.
Reasons why_not_cache(const CallShape& call) {
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
  reasons.refuse_if(group_rows(call) >= kMaxRows,
                    "2^20 or more rows (tokens times query heads) read one kv head");
  reasons.refuse_if(call.capacity >= kMaxKeys, "the cache has 2^30 or more places a sequence");
  reasons.refuse_if(call.batch * call.capacity >= kMaxAllKeys,
                    "the cache has 2^35 or more places for the whole batch");
  return reasons;
}

// Of the kernels that were made for prefill.
void refuse_decode(Reasons& reasons, const CallShape& call) {
  // A number of 8 bits times its descale has more bits than the 16 of their K and V.
  reasons.refuse_if(call.cache_dtype != call.dtype, "a cache of 8 bits is not supported");
  reasons.refuse_if(call.num_splits > 1, "num_splits above 1 is not supported");
  // Whether they are chosen depends on the batch.
  reasons.refuse_if(call.batch_invariant, "batch_invariant is not supported");
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of 128 queries of one head.
int64_t prefill_tiles(const CallShape& call) {
  constexpr int64_t kTileQueries = 128;
  return call.batch * call.heads_q * ceil_div(call.tokens, kTileQueries);
}

// Whether a prefill kernel is the faster one for new tokens against a cache, by the thread blocks'
// time for each key. Decode's blocks, of 16 rows of one kv head, share a sequence's keys and so always
// fill the device; tiles of 128 queries of one head leave a part of it idle where they are few and
// not cut. Pages are copied before: for each kv head as long as some of decode's blocks take, which
// pages slow down, too. Lengths do not matter.
//
// H200, d = 128 against 8k and 32k keys, 32 / 8 heads, decode's time ÷ sm90's, batch 1: 64 tokens 1.5
// and 1.6 (in pages of 16 1.5 and 1.8), 256 2.6 and 3.0 (2.5 and 3.0), 1024 3.1 and 3.3 (3.6 and 3.5);
// batch 8: 64 tokens 1.7 (1.3). Tiles not cut, batch 1: 64 tokens 0.59, 128 0.87; batch 4: 32 tokens
// 0.82, 64 1.9. ÷ sm80's: 256 tokens 0.67, batch 4 1.7. d = 64, sm90: 256 tokens 0.78, 1024 2.1.
bool prefill_is_faster(Backend backend, const CallShape& call) {
  constexpr int64_t kDecodeTokens = 16, kDecodeRows = 16, kPagesCost = 6;
  constexpr double kMergeCost = 1.2, kPagesSlowDecode = 1.2;
  if (call.tokens <= kDecodeTokens || call.num_sms == 0) return false;
  const int64_t widest = std::max(call.head_dim, call.head_dim_v);
  const int splits = backend == Backend::kSm90 ? prefill_splits(call) : 1;
  const bool narrow = widest <= 64 && (widest > 48 || splits > 1);  // what runs as d = 64
  const double tile_cost = backend == Backend::kSm90 && !narrow ? 2.25 : 4.75;  // decode's blocks
  const int64_t waves = ceil_div(prefill_tiles(call) * splits, call.num_sms);
  const double cost = tile_cost * static_cast<double>(waves * call.num_sms) / splits *
                      (splits > 1 ? kMergeCost : 1.0);
  const int64_t kv_heads = call.batch * call.heads_kv;
  const int64_t decode_cost = kv_heads * ceil_div(group_rows(call), kDecodeRows);
  if (!call.paged) return cost <= static_cast<double>(decode_cost);
  return cost + static_cast<double>(kPagesCost * kv_heads) <=
         kPagesSlowDecode * static_cast<double>(decode_cost);
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
  const bool decode = call.op == Op::kDecode;
  if (backend == Backend::kCuda) {
    if (decode) return why_not_cache(call).take();
    return {"it serves flash_decode_func and flash_attn_with_kvcache only"};
  }
  Reasons reasons = decode ? why_not_cache(call) : why_not_cuda(call);
  if (decode) refuse_decode(reasons, call);
  if (decode || backend == Backend::kSm80) {
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

int prefill_splits(const CallShape& call) {
  constexpr int64_t kMaxSplits = 16, kMaxHeadDim = 128;
  const bool cut = call.head_dim == call.head_dim_v && call.head_dim <= kMaxHeadDim;
  if (call.num_splits == 1 || !cut) return 1;
  const int64_t tiles = std::max<int64_t>(prefill_tiles(call), 1);
  return static_cast<int>(std::clamp<int64_t>(call.num_sms / tiles, 1, kMaxSplits));
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
    const bool prefill = backend == Backend::kSm90 || backend == Backend::kSm80;
    if (call.op == Op::kDecode && prefill && !prefill_is_faster(backend, call)) continue;
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
