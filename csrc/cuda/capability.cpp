#include "capability.h"

#include <algorithm>
#include <limits>

namespace flash_attn::cuda {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 100 -> "10.0"
std::string version(int architecture) {
  return std::to_string(architecture / 10) + "." + std::to_string(architecture % 10);
}

}  // namespace

int64_t group_rows(const CallShape& call) { return call.tokens * (call.heads_q / call.heads_kv); }

void refuse_without_gpu(Reasons& reasons, const CallShape& call) {
  reasons.refuse_if(call.compiled->none(), "this build of flash_attn has no CUDA kernels");
  reasons.refuse_if(call.device == nullptr, "the tensors are not on a CUDA device");
}

void refuse_without_code(Reasons& reasons, const CallShape& call) {
  if (call.device == nullptr || call.compiled->none()) return;
  const int capability = call.device->compute_capability;
  reasons.refuse_if(capability < 80, "the GPU is older than compute capability 8.0");
  reasons.refuse_if(capability >= 80 && call.portable_code() == 0, [&] {
    return "this build was compiled for " + call.compiled->list() +
           " and has no code for compute capability " + version(capability);
  });
}

void refuse_dtype(Reasons& reasons, const CallShape& call) {
  reasons.refuse_if(call.dtype != DType::kFp16 && call.dtype != DType::kBf16,
                    "dtype is not float16 or bfloat16");
}

void refuse_dtype_of_three(Reasons& reasons, const CallShape& call) {
  reasons.refuse_if(
      call.dtype != DType::kFp16 && call.dtype != DType::kBf16 && call.dtype != DType::kFp32,
      "dtype is not float16, bfloat16 or float32");
}

void refuse_head_dims(Reasons& reasons, const CallShape& call, int64_t largest) {
  const int64_t head_dim = std::max(call.head_dim, call.head_dim_v);
  reasons.refuse_if(head_dim > largest, [&] {
    return "head_dim " + std::to_string(head_dim) + " is above " + std::to_string(largest);
  });
}

void refuse_tensors(Reasons& reasons, const CallShape& call) {
  refuse_dtype(reasons, call);
  refuse_head_dims(reasons, call, kMostHeadDim);
}

bool changes_logits(const CallShape& call) {
  return call.softcap || call.alibi || (call.bias && !call.bool_mask);
}

void refuse_cache(Reasons& reasons, const CallShape& call) {
  const bool fp8 = call.cache_dtype == DType::kFp8E4M3;
  const int64_t multiple = fp8 || call.cache_dtype == DType::kInt8 ? 16 : 8;
  reasons.refuse_if(call.head_dim % multiple != 0 || call.head_dim_v % multiple != 0, [&] {
    return "a head_dim of the caches is not a multiple of " + std::to_string(multiple);
  });
  // Code for older GPUs has no instruction that widens fp8, on whatever GPU it runs.
  constexpr int kWidensFp8 = 89;
  const int code = call.portable_code();
  reasons.refuse_if(fp8 && code > 0 && code < kWidensFp8, [&] {
    return "a cache of fp8 needs a GPU of compute capability 8.9 or newer and code compiled for "
           "it, what runs here is compiled for " +
           version(code);
  });
  // The kernels count rows, and tiles of all sequences, in 32 bits or less.
  constexpr int64_t kMaxRows = int64_t{1} << 20, kMaxKeys = int64_t{1} << 30,
                    kMaxAllKeys = int64_t{1} << 35;
  reasons.refuse_if(group_rows(call) >= kMaxRows,
                    "2^20 or more rows (tokens times query heads) read one kv head");
  reasons.refuse_if(call.capacity >= kMaxKeys, "the cache has 2^30 or more places a sequence");
  reasons.refuse_if(call.batch * call.capacity >= kMaxAllKeys,
                    "the cache has 2^35 or more places for the whole batch");
}

void refuse_cache_of_forward(Reasons& reasons, const CallShape& call) {
  refuse_cache(reasons, call);
  // A number of 8 bits times its descale has more bits than the 16 of their K and V.
  reasons.refuse_if(call.cache_dtype != call.dtype, "a cache of 8 bits is not supported");
  reasons.refuse_if(call.num_splits > 1, "num_splits above 1 is not supported");
  // Whether they are chosen depends on the batch.
  reasons.refuse_if(call.batch_invariant, "batch_invariant is not supported");
  reasons.refuse_if(call.max_logits, "return_max_logits is not supported");
  reasons.refuse_if(call.alibi, "alibi_slopes is not supported");
  reasons.refuse_if(call.bias, "attn_bias and tree_mask are not supported");
  reasons.refuse_if(call.softcap, "softcap is not supported");
  reasons.refuse_if(call.sink, "learnable_sink is not supported");
}

int64_t forward_tiles(const CallShape& call) {
  return call.batch * call.heads_q * ceil_div(call.tokens, kForwardTileQueries);
}

double forward_cost(const CallShape& call, double tile_cost, int splits) {
  constexpr int64_t kDecodeTokens = 16;
  // Pages are copied before: for each kv head as long as some of decode's blocks take.
  constexpr double kPagesCost = 6, kMergeCost = 1.2;
  if (call.tokens <= kDecodeTokens || call.device == nullptr) {
    return std::numeric_limits<double>::infinity();
  }
  const int num_sms = call.device->num_sms;
  const int64_t waves = ceil_div(forward_tiles(call) * splits, num_sms);
  const double cost =
      tile_cost * static_cast<double>(waves * num_sms) / splits * (splits > 1 ? kMergeCost : 1.0);
  const auto kv_heads = static_cast<double>(call.batch * call.heads_kv);
  return cost + (call.paged ? kPagesCost * kv_heads : 0.0);
}

}  // namespace flash_attn::cuda
