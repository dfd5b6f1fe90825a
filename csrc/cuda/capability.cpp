#include "capability.h"

#include <algorithm>

namespace flash_attn::cuda {
namespace {

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
  // Of a varlen call it joins the first piece; merges of a cache's pieces know of none.
  reasons.refuse_if(call.sink && !call.gathers, "learnable_sink is not supported");
}

namespace {

// By the guess at lengths. Where most sequences are long, lengths may as well lie anywhere below the
// longest, and half of the last tile of each is empty.
int64_t listed_tiles(const CallShape& call, int64_t tile_tokens) {
  const int64_t of_short = call.short_sequences * ceil_div(call.short_tokens, tile_tokens);
  const int64_t of_long = call.long_sequences * ceil_div(call.long_tokens, tile_tokens);
  if (call.long_sequences < call.short_sequences) return of_short + of_long;
  return std::min(of_short + of_long,
                  call.guessed_tokens() / tile_tokens + ceil_div(call.guessed_sequences(), 2));
}

int64_t tiles_of_head(const CallShape& call, int64_t tile_tokens) {
  return call.lists_tiles ? listed_tiles(call, tile_tokens)
                          : call.batch * ceil_div(call.tokens, tile_tokens);
}

}  // namespace

int64_t forward_tiles(const CallShape& call, int64_t tile_tokens) {
  if (call.heads_kv == 0) return 0;
  const int64_t heads = kForwardTileQueries / tile_tokens;
  const int64_t tiles_of_group = ceil_div(call.heads_q / call.heads_kv, heads);
  return call.heads_kv * tiles_of_group * tiles_of_head(call, tile_tokens);
}

int64_t most_keys(const CallShape& call) {
  const int64_t keys = call.longest > 0 ? std::min(call.longest, call.capacity) : call.capacity;
  return call.window_left < 0 ? keys : std::min(keys, call.window_left + call.tokens);
}

bool has_few_tokens(const CallShape& call) {
  constexpr int64_t kFewTokens = 16;
  return call.device == nullptr || call.tokens <= kFewTokens;
}

double read_time(const CallShape& call) {
  const auto bytes = static_cast<double>(2 * call.batch * call.heads_kv * most_keys(call) *
                                         (call.head_dim + call.head_dim_v));
  return kReadTime * bytes / static_cast<double>(kReadBytes * call.device->num_sms);
}

double decode_key_time(const CallShape& call) {
  constexpr double kColumnTime = 57e-6;  // of a column of K and one of V, in 16 bits
  constexpr int64_t kLeastWidth = 64;
  const auto width = static_cast<double>(std::max({call.head_dim, call.head_dim_v, kLeastWidth}));
  return kColumnTime * width * (call.dtype == DType::kFp32 ? 2 : 1);
}

namespace {

// The tiles of a forward, the keys of each in so many pieces. shares_sms: with decode's blocks.
struct Pieces {
  int64_t count;
  int64_t at_once;  // that the device holds
  double time;      // that each takes
  double merge_time;

  Pieces(const CallShape& call, const ForwardTile& tile, int splits, bool shares_sms)
      : count(forward_tiles(call, tile.tokens) * splits),
        at_once(call.device->num_sms),
        merge_time(0) {
    constexpr int64_t kLeastKeys = 128;   // of a piece
    constexpr double kTwoAnSm = 1.6;      // the time of two on one SM
    constexpr double kLookUpPages = 1.2;  // the time of keys in pages
    // The merge has a thread block for each row of results, and pieces are written and read.
    constexpr double kMerge = 2, kMergeRow = 0.2e-3, kMergeColumn = 1.8e-6;

    const int64_t all_keys = most_keys(call);
    const auto keys = static_cast<double>(
        splits == 1 ? all_keys : ceil_div(all_keys, splits * kLeastKeys) * kLeastKeys);
    const bool two_an_sm = tile.two_an_sm && (shares_sms || count > at_once);
    if (two_an_sm) at_once *= 2;
    const bool in_place = call.paged && !tile.copies_pages;
    time = keys * tile.key_time * (two_an_sm ? kTwoAnSm : 1) * (in_place ? kLookUpPages : 1) +
           tile.start_time;
    if (splits == 1) return;
    const int64_t tokens = call.lists_tiles ? call.guessed_tokens() : call.batch * call.tokens;
    const auto rows = static_cast<double>(tokens * call.heads_q);
    const auto columns = static_cast<double>(splits * call.head_dim_v);
    merge_time = kMerge + rows * (kMergeRow + kMergeColumn * columns);
  }
};

// As long as the longer of the two, and up to an eighth more where they are nearly the same.
double both_limits(double a, double b) {
  const double longer = std::max(a, b);
  if (longer == 0) return 0;
  const double ratio = std::min(a, b) / longer;
  return longer * (1 + 0.125 * ratio * ratio * ratio * ratio * ratio);
}

}  // namespace

double forward_time(const CallShape& call, const ForwardTile& tile, int splits) {
  // A thread block of its own for each SM reads slower than two of decode's.
  constexpr double kReadSlow = 1.05;
  // Two more kernels find and serve the sequences that lack a page.
  constexpr double kMissingPages = 6;
  // The pages of each kv head are copied in the time of six blocks of decode's.
  constexpr double kCopy = 6;

  const Pieces pieces(call, tile, splits, /*shares_sms=*/false);
  const auto waves = static_cast<double>(ceil_div(pieces.count, pieces.at_once));
  double time = tile.launch_time + both_limits(waves * pieces.time, kReadSlow * read_time(call)) +
                pieces.merge_time;
  if (call.paged && !tile.hides_missing_pages) time += kMissingPages;
  if (call.paged && tile.copies_pages) {
    const auto heads_keys = static_cast<double>(call.batch * call.heads_kv * most_keys(call));
    time += kCopy * heads_keys * decode_key_time(call) / call.device->num_sms;
  }
  return time;
}

double forward_time_beside_decode(const CallShape& call, const ForwardTile& tile, int splits) {
  const Pieces pieces(call, tile, splits, /*shares_sms=*/true);
  const int64_t at_once = std::max<int64_t>(pieces.at_once / 2, 1);
  // When the pieces end that each half of the SMs works on.
  double first_half = pieces.time, second_half = call.decode_time + pieces.time, end = 0;
  for (int64_t done = 0; done < pieces.count; done += at_once) {
    double& half = first_half <= second_half ? first_half : second_half;
    end = half;
    half += pieces.time;
  }
  return std::max(end, call.decode_time) + pieces.merge_time;
}

}  // namespace flash_attn::cuda
