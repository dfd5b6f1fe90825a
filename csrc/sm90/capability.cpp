#include "capability.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "../cuda/capability.h"
#include "../cuda/decode/plan.h"
#include "bwd_config.h"
#include "config.h"
#include "latent.h"

namespace flash_attn::sm90 {
namespace {

static_assert(kPiecesTile<64>.block_m() == cuda::kForwardTileQueries &&
              kPiecesTile<128>.block_m() == cuda::kForwardTileQueries &&
              kPiecesTile<256>.block_m() == cuda::kForwardTileQueries);

std::string_view why_not_op(Op) { return ""; }

void refuse_here(Reasons& reasons, const CallShape& call) {
  cuda::refuse_without_gpu(reasons, call);
  // For a call with a cache, other kernels gather pages, rotate queries and merge pieces.
  if (call.op == Op::kDecode) cuda::refuse_without_code(reasons, call);
  reasons.refuse_if(
      call.device != nullptr && !call.compiled->none() && call.device->compute_capability != 90,
      "the GPU is not of compute capability 9.0");
}

// Whether the kernels that skip the hidden tiles of a mask serve the call.
bool skips_tiles(const CallShape& call) {
  const bool has_terms = call.alibi || call.softcap || call.dropout;
  return call.tile_mask && !has_terms && !call.ragged && !call.max_logits && !call.deterministic;
}

void refuse_backward(Reasons& reasons, const CallShape& call) {
  reasons.refuse_if(call.bias_gradient && call.bias_of_keys,
                    "the gradient of an attn_bias that broadcasts the queries is not supported");
  // What dQ's kernel does not store itself, one of sm80 computes beside it.
  if (call.bias_gradient) cuda::refuse_without_code(reasons, call);
  const bool has_terms = call.alibi || call.softcap || call.bias || call.dropout;
  reasons.refuse_if(call.deterministic && has_terms,
                    "deterministic with score terms or dropout is not supported");
  // Slopes leave most probabilities below the normal range of fp16, to which kernels for several
  // terms round them before they become gradients.
  const bool has_several_terms = call.softcap || call.dropout || (call.bias && !call.dense_bias);
  reasons.refuse_if(call.alibi && has_several_terms && call.dtype == DType::kFp16,
                    "alibi_slopes in float16 beside other score terms is not supported in the "
                    "backward");
  if (std::max(call.head_dim, call.head_dim_v) <= kBwdMaxSingleHeadDim) return;
  const auto refuse_there = [&](bool refused, std::string_view what) {
    reasons.refuse_if(refused, [&] {
      return std::string(what) + " is not supported in the backward above head_dim " +
             std::to_string(kBwdMaxSingleHeadDim);
    });
  };
  refuse_there(call.alibi, "alibi_slopes");
  refuse_there(call.softcap, "softcap");
  refuse_there(call.bias && !skips_tiles(call), "attn_bias");
  refuse_there(call.dropout, "dropout_p");
}

// Whether the kernel of latent attention serves the call. It knows of no score terms, and rotates
// no queries: values would be rotated with their keys. TMA reads whole eights of keys of a page
// (latent_loads.cuh).
bool is_latent(const CallShape& call) {
  const bool has_terms = call.softcap || call.alibi || call.bias;
  return call.op == Op::kDecode && call.values_in_keys && !has_terms && !call.rotates &&
         !call.odd_pages && call.head_dim > cuda::kMostHeadDim && call.head_dim <= kLatentHeadDim &&
         call.head_dim_v <= kLatentHeadDimV;
}

void refuse_call(Reasons& reasons, const CallShape& call) {
  if (is_latent(call)) {
    cuda::refuse_dtype(reasons, call);
    cuda::refuse_cache(reasons, call);
    reasons.refuse_if(call.cache_dtype != call.dtype, "a cache of 8 bits is not supported");
    return;
  }
  cuda::refuse_tensors(reasons, call);
  if (call.op == Op::kDecode) return cuda::refuse_cache_of_forward(reasons, call);
  reasons.refuse_if(call.return_probs, "return_attn_probs is not supported");
  reasons.refuse_if(call.max_logits && call.bias,
                    "return_max_logits with attn_bias is not supported");
  reasons.refuse_if(call.paged && (call.bias || call.dropout),
                    "a block_table with attn_bias or dropout_p is copied first");
  if (call.op == Op::kBackward) refuse_backward(reasons, call);
}

// How many rows of a tile each of the heads that share it has, a power of two. Query heads of few
// tokens share one if they read one kv head, and if tiles are fewer then; else a tile has one head.
// Lengths that a list knows are a guess here. Where it is wrong, sharing costs the least, most of all
// beside decode, which may leave more sequences than guessed: a seventh more tiles are accepted.
int64_t tile_tokens(const CallShape& call) {
  constexpr int64_t kTile = cuda::kForwardTileQueries;
  const bool is_few = call.op == Op::kDecode && call.tokens <= kTile;
  if (!(is_few || call.lists_tiles) || call.heads_kv == 0 || call.head_dim != call.head_dim_v) {
    return kTile;
  }
  const int64_t group = call.heads_q / call.heads_kv;
  const int64_t accepted_more = call.decode_time > 0 ? 7 : std::numeric_limits<int64_t>::max();
  int64_t best = kTile, fewest = cuda::forward_tiles(call);
  for (int64_t tokens = kTile / 2; tokens > 0; tokens /= 2) {
    const int64_t tiles = cuda::forward_tiles(call, tokens);
    if (tiles < fewest || (call.lists_tiles && tiles <= fewest + fewest / accepted_more)) {
      best = tokens;
      fewest = std::min(fewest, tiles);
    }
    if (kTile / tokens >= group) break;
  }
  return best;
}
bool shares_tiles(const CallShape& call) { return tile_tokens(call) < cuda::kForwardTileQueries; }

// How long a tile takes whose keys may be cut. Narrow is what runs as d = 64, with cut keys d <= 48
// too: its exponentials take longer than the products of wider tiles.
cuda::ForwardTile key_tile(const CallShape& call, int splits) {
  constexpr double kKey = 0.0103, kNarrowKey = 0.012;  // µs, up to d = 128
  constexpr double kLaunch = 7, kStartColumn = 0.022;  // µs
  // A listed tile's results leave from registers, many rows of them one by one.
  constexpr double kListedStart = 1;
  const int64_t widest = std::max(call.head_dim, call.head_dim_v);
  const int64_t cut_class =
      with_pieces_class(static_cast<int>(widest), []<int kHeadDim> { return kHeadDim; });
  const bool in_pieces = splits > 1 || shares_tiles(call) || call.lists_tiles;
  const auto width = static_cast<double>(in_pieces ? cut_class : widest);
  const bool narrow = widest <= 64 && (widest > 48 || in_pieces);
  return {.launch_time = kLaunch,
          .key_time = narrow ? kNarrowKey : kKey * std::max(1.0, width / 128),
          .start_time = kStartColumn * width + (call.lists_tiles ? kListedStart : 0),
          .two_an_sm = narrow && kPiecesTile<64>.blocks == 2,
          .copies_pages = false,
          .hides_missing_pages = in_pieces,
          .tokens = tile_tokens(call)};
}

double time_of_keys(const CallShape& call, int splits) {
  return cuda::forward_time(call, key_tile(call, splits), splits);
}

// The calls of the long sequences of one alone, and of all of its sequences, each with tiles of its
// own.
CallShape of_long_sequences(CallShape call) {
  if (call.long_sequences == 0) return call;
  call.short_sequences = 0;
  call.batch = call.long_sequences;
  call.lists_tiles = true;
  return call;
}
CallShape of_all_sequences(CallShape call) {
  if (call.tokens == 0) call.num_splits = 1;  // nothing may be cut
  call.batch = call.guessed_sequences();
  call.decode_time = 0;
  call.lists_tiles = true;
  return call;
}

// Into how many pieces the keys of few tiles are cut beside decode, which leaves half of the device
// to them at first. Of counts that are nearly as good, the least.
int best_num_splits_beside_decode(const CallShape& call) {
  constexpr int kMaxSplits = 8;
  constexpr double kNearly = 1.03;
  const cuda::ForwardTile tile = key_tile(call, 2);  // of these kernels, in one piece as well
  const int64_t resident = call.device->num_sms * (tile.two_an_sm ? 2 : 1);
  if (cuda::forward_tiles(call, tile.tokens) > resident) return 1;
  double times[kMaxSplits];
  for (int i = 0; i < kMaxSplits; ++i) {
    times[i] = cuda::forward_time_beside_decode(call, tile, i + 1);
  }
  const double enough = kNearly * *std::ranges::min_element(times);
  const auto* const least = std::ranges::find_if(times, [=](double t) { return t <= enough; });
  return static_cast<int>(least - times) + 1;
}

// Into how many pieces the keys of each tile are cut, all of which run at a time, or a few more of a
// list. With 1 they are not cut.
int best_num_splits(const CallShape& call) {
  constexpr int64_t kMostListed = 4;
  const int64_t most_splits = shares_tiles(call) ? 64 : 16;
  const bool cut = call.head_dim == call.head_dim_v;  // what with_pieces_class() knows
  if (call.device == nullptr || call.num_splits == 1 || !cut) return 1;
  const int64_t tiles = std::max<int64_t>(cuda::forward_tiles(call, tile_tokens(call)), 1);
  const cuda::ForwardTile tile = key_tile(call, 2);  // of all calls whose keys are cut
  const int64_t resident = call.device->num_sms * (tile.two_an_sm ? 2 : 1);
  const bool may_be_more = call.lists_tiles && tiles <= kMostListed * resident;
  const int64_t most =
      std::max(std::min(most_splits, resident / tiles), may_be_more ? kMostListed : 1);
  int best = 1;
  double best_time = time_of_keys(call, 1);
  for (int splits = 2; splits <= most; ++splits) {
    const double time = cuda::forward_time(call, tile, splits);
    if (time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

// Into how many parts all keys are cut at most. None has fewer than two tiles. In one sequence, one
// part more shortens the others' work and takes time to merge, for each of its rows: by the times
// of both on an H200 (docs/kernels/decode.md) so many are the fastest.
int64_t most_latent_parts(const CallShape& call) {
  constexpr int64_t kLeastTiles = 2;
  constexpr double kTileByMergedRow = 1536;
  const int64_t tiles = call.batch * ceil_div(call.capacity, kLatentKeys);
  const int64_t most = ceil_div(tiles, kLeastTiles);
  if (call.batch > 1) return most;
  const auto rows = static_cast<double>(cuda::group_rows(call));
  return std::min(most, static_cast<int64_t>(std::sqrt(kTileByMergedRow * tiles / rows)));
}

Plan plan_latent(const CallShape& call) {
  const int64_t items = call.heads_kv * ceil_div(cuda::group_rows(call), kLatentRows);
  const int64_t parts =
      items == 0 ? 0 : std::min(call.device->num_sms / items, most_latent_parts(call));
  return cuda::plan_kvcache(call, Kernel::kLatent,
                            {.parts = static_cast<int>(std::max<int64_t>(parts, 1))});
}

double cost(const CallShape& call) {
  if (skips_tiles(call)) return 0;
  constexpr double kBiasCost = 3 * cuda::kReadMaskCost;
  const int64_t widest = std::max(call.head_dim, call.head_dim_v);
  // A bias costs narrow heads more here than the products cost sm80, if it is read number by
  // number, as it is unless can_stage_bias() or broadcasts_queries().
  const bool is_cheap = (call.dense_bias || call.bias_of_keys) && !call.softcap && !call.dropout;
  if (call.op == Op::kBackward && call.bias && !is_cheap && widest <= 64) return kBiasCost;
  if (call.op != Op::kDecode) return call.tile_mask ? cuda::kReadMaskCost : 0;
  if (is_latent(call)) return 0;
  if (cuda::is_for_decode(call)) return std::numeric_limits<double>::infinity();
  return time_of_keys(call, best_num_splits(call));
}

// Whether the kernels whose keys may be cut serve a forward.
bool may_run_in_pieces(const CallShape& call) {
  return call.op == Op::kForward && call.head_dim == call.head_dim_v &&
         !cuda::changes_logits(call) && !call.bias && !call.dropout && !call.max_logits &&
         call.portable_code() != 0;
}

// Whether all sequences, whose tiles a list has, take less time than otherwise.
bool list_is_faster(const CallShape& call) {
  // µs that the kernels around decode and the forward beside it take, more of them with pages, and a
  // list elsewhere. There it has to gain something, as the estimates are rough.
  constexpr double kAround = 25, kAroundInPages = 37, kList = 1, kGain = 1.05;
  constexpr int64_t kMostSequences = 4096;  // one thread block lists their tiles
  const CallShape all = of_all_sequences(call);
  if (call.long_sequences == 0 || all.batch > kMostSequences) return false;
  const double listed = time_of_keys(all, best_num_splits(all));
  if (call.decode_time > 0) {
    const CallShape long_ones = of_long_sequences(call);
    return listed < (call.paged ? kAroundInPages : kAround) +
                        cuda::forward_time_beside_decode(long_ones, key_tile(long_ones, 2),
                                                         best_num_splits_beside_decode(long_ones));
  }
  const int splits = call.tokens > 0 ? best_num_splits(call) : 1;
  const double whole =
      splits > 1 ? time_of_keys(call, splits) : cuda::forward_time(all, key_tile(call, 1), 1);
  return kGain * listed + kList < whole;
}

Plan plan_listed(const CallShape& call) {
  const CallShape all = of_all_sequences(call);
  Plan plan = {.splits = Splits::alike(best_num_splits(all)), .lists_tiles = true};
  if (shares_tiles(all)) plan.tile_tokens = static_cast<int>(tile_tokens(all));
  return plan;
}

// Kernels whose keys are cut have fewer classes of head dims, and d_v = d. In the narrowest one
// they have tiles for few queries.
bool pieces_are_slower(const CallShape& call) {
  const int head_dim = static_cast<int>(call.head_dim);
  const int own =
      with_head_dim_class(head_dim, head_dim, []<int kHeadDim, int kHeadDimV> { return kHeadDim; });
  return with_pieces_class(
      head_dim, [own]<int kHeadDim> { return own < kHeadDim || kPiecesTile<kHeadDim>.blocks > 1; });
}

// The long sequences of a call, beside decode of the short ones. Where those are many, decode takes
// as long as the forward, which gains more by running beside it than it may lose by other tiles.
Plan plan_beside(const CallShape& call) {
  constexpr int64_t kFewTokens = 64;  // of a sequence, on the mean
  const CallShape long_ones = of_long_sequences(call);
  Plan plan = {.splits = Splits::alike(best_num_splits_beside_decode(long_ones))};
  plan.runs_beside = plan.splits.count > 1 || !pieces_are_slower(call) ||
                     kFewTokens * call.guessed_sequences() > call.guessed_tokens();
  if (plan.runs_beside && shares_tiles(long_ones)) {
    plan.tile_tokens = static_cast<int>(tile_tokens(long_ones));
  }
  return plan;
}

Plan plan(const CallShape& call) {
  if (is_latent(call)) return plan_latent(call);
  if (call.op == Op::kDecode) {
    Plan plan = cuda::plan_forward_on_cache(call, best_num_splits(call));
    if (shares_tiles(call)) plan.tile_tokens = static_cast<int>(tile_tokens(call));
    return plan;
  }
  const bool in_pieces = may_run_in_pieces(call);
  if (in_pieces && list_is_faster(call)) return plan_listed(call);
  if (in_pieces && call.decode_time > 0) return plan_beside(call);
  return {.kernel = call.op == Op::kForward ? Kernel::kFwd : Kernel::kBwd,
          .splits = Splits::alike(in_pieces && call.tokens > 0 ? best_num_splits(call) : 1),
          .skips_tiles = skips_tiles(call),
          .max_logits_apart = call.max_logits && (cuda::changes_logits(call) || call.dropout)};
}

}  // namespace

const KernelFamily kFamily = {.backend = Backend::kSm90,
                              .why_not_op = why_not_op,
                              .refuse_here = refuse_here,
                              .refuse_call = refuse_call,
                              .cost = cost,
                              .plan = plan};

}  // namespace flash_attn::sm90
