// A forward of few queries beside many keys, as in generation, on decode's kernels: they cut the keys
// into pieces, and query heads that share a kv head are rows of one product. Or on sm90's forward,
// in whose tiles such heads share rows (Plan::tile_tokens).
#pragma once

#include "../cuda/capability.h"
#include "../cuda/few_queries.h"
#include "to_params.h"

namespace flash_attn {

struct FewQueriesCall {
  DecodeArgs args;  // q of a varlen call has its shape alone: nothing is allocated for it yet
  CallShape shape;
  Plan plan;
  bool serves_all;  // else only those sequences of a varlen call for whose queries q has room
};

// The call as one of decode, of checked arguments; none: it is not of that kind.
std::optional<FewQueriesCall> few_queries_call(const FwdArgs& args);

// The call as one of the forward's kernels, which may cut the keys of a varlen one with few tiles,
// or take its tiles from a list. few: few_queries_call(), or null.
CallShape forward_shape(const FwdArgs& args, const FewQueriesCall* few);

// The results of a call that decode serves.
FwdResult fwd_of_few_queries(FewQueriesCall call, const FwdArgs& args);

// Room for the tiles of each head of a varlen call, or of heads that share tiles, on the device.
class ListedTiles {
 public:
  ListedTiles(const FwdParams& params, int queries_of_tile, const at::Tensor& like);

  const cuda::TileList& list() const { return list_; }

 private:
  at::Tensor memory_;
  cuda::TileList list_;
};

// Decode's part of a varlen call. Batches of a serving engine have sequences of one query beside
// others of hundreds: decode takes the short ones, and the forward's kernels the rest.
class VarlenDecode {
 public:
  // params: of the call's readable() arguments. Where decode does not serve all, they become those
  // of a forward of the long sequences, which are dealt out, with tile_tokens queries of each head to
  // a tile.
  VarlenDecode(FewQueriesCall call, FwdParams& params, const at::Tensor& like,
               int tile_tokens = cuda::kForwardTileQueries);

  // Those of the long sequences.
  const cuda::TileList& long_tiles() const { return long_tiles_->list(); }

  // Launches decode, whose results scatter() takes.
  void launch();

  // Writes the results to their places in out and lse of these params, over what the forward has
  // written to them.
  void scatter(const FwdParams& results, Stream stream) const;

 private:
  FewQueriesCall call_;
  int tokens_;
  FwdParams whole_;  // of the whole call
  at::Tensor ends_, long_ones_;
  std::optional<ListedTiles> long_tiles_;
  DecodeResult results_;
};

}  // namespace flash_attn
