// What is decided of a call before anything is allocated or launched.
#pragma once

#include "call.h"
#include "kvcache_grid.h"

namespace flash_attn {

enum class Backend : uint8_t { kSm90, kSm80, kCuda, kAten };

// Which kernel runs, by the name of its file.
enum class Kernel : uint8_t { kFwd, kBwd, kDecode, kKvcache, kLatent };

struct Plan {
  Backend backend = Backend::kAten;
  Kernel kernel = Kernel::kFwd;
  Splits splits = Splits::alike(1);  // of decode, and of the forward against a cache
  int64_t workspace_rows = 0;        // of PartialResults
  KvcacheGrid grid;                  // of kvcache, and of latent
  bool runs_beside = false;          // a forward of long sequences, beside decode of short ones
  bool skips_tiles = false;          // reads the call's mask of tiles; else it becomes an attn_bias
  bool max_logits_apart = false;     // by a second call, without the terms that change logits
  const DeviceInfo* device = nullptr;  // null: not on CUDA
  int tile_tokens = 0;       // > 0: heads share tiles of a forward, of which each has so many rows
  bool lists_tiles = false;  // a list has the tiles of a forward in pieces, of unlike sequences
  int prefix_pieces = 0;     // > 0: leading pages that sequences share are read once, in so many
  // What serves the sequences that a forward over copied pages leaves, and how it walks over them.
  Kernel rest = Kernel::kKvcache;
  Splits rest_splits = Splits::alike(1);
};

}  // namespace flash_attn
