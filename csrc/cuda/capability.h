// What the CUDA kernels ask for, and what a call costs them: of all, and of those that read a
// cache.
#pragma once

#include "../core/backend.h"

namespace flash_attn::cuda {

// Rows of q that read one kv head of a sequence.
int64_t group_rows(const CallShape& call);

// What every CUDA kernel asks for: a build with CUDA, tensors on a GPU.
void refuse_without_gpu(Reasons& reasons, const CallShape& call);
// The portable kernels: code that runs on the GPU.
void refuse_without_code(Reasons& reasons, const CallShape& call);
// Most CUDA kernels: fp16 and bf16, head dims up to kMostHeadDim.
inline constexpr int64_t kMostHeadDim = 256;
void refuse_tensors(Reasons& reasons, const CallShape& call);
// What it consists of. refuse_dtype_of_three() allows fp32, too.
void refuse_dtype(Reasons& reasons, const CallShape& call);
void refuse_dtype_of_three(Reasons& reasons, const CallShape& call);  // fp32 too
void refuse_head_dims(Reasons& reasons, const CallShape& call, int64_t largest);
// Whether terms make scores differ from the logits that max_logits is about.
bool changes_logits(const CallShape& call);
// Every kernel that reads a cache.
void refuse_cache(Reasons& reasons, const CallShape& call);
// The forward kernels, where they serve decode.
void refuse_cache_of_forward(Reasons& reasons, const CallShape& call);

// The cost of a forward or backward that reads a mask of tiles as a bias, whatever it hides. It is
// not a time: where another kernel skips hidden tiles, that one is the first choice.
inline constexpr double kReadMaskCost = 1;

// Costs of decode calls are estimated times on an H200, in µs (docs/kernels/decode.md). The lengths
// are on the device; the host knows what bounds them. Windows count from the end.
int64_t most_keys(const CallShape& call);
// So few tokens that sm80's forward is no choice.
bool has_few_tokens(const CallShape& call);
// In which an H200 reads so many bytes for each SM.
inline constexpr double kReadTime = 1.9;
inline constexpr int64_t kReadBytes = 64 * 1024;
// What the device takes to read all keys and values once.
double read_time(const CallShape& call);
// What a thread block of decode's, with 16 rows of one kv head, takes for a key.
double decode_key_time(const CallShape& call);

// A thread block of a forward kernel, with kForwardTileQueries rows of queries.
inline constexpr int kForwardTileQueries = 128;
struct ForwardTile {
  double launch_time;
  double key_time;                   // that it takes for a key
  double start_time;                 // and for its queries and its results
  bool two_an_sm;                    // two share an SM where there are more blocks than SMs
  bool copies_pages;                 // side by side, before
  bool hides_missing_pages = false;  // else two kernels more serve sequences that lack one
  // Rows of each head: with fewer than all, several heads share the tile.
  int64_t tokens = kForwardTileQueries;
};
// Tiles of the whole call, not cut; where a list has them, by the guess at lengths. tile_tokens:
// ForwardTile::tokens.
int64_t forward_tiles(const CallShape& call, int64_t tile_tokens = kForwardTileQueries);
// With the keys of each tile in `splits` pieces, which decode's kernel merges.
double forward_time(const CallShape& call, const ForwardTile& tile, int splits);
// The same beside decode of other sequences, which takes call.decode_time: half of the SMs begin with
// the pieces, and the others take part when decode has ended.
double forward_time_beside_decode(const CallShape& call, const ForwardTile& tile, int splits);

}  // namespace flash_attn::cuda
