#include "few_queries.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

#include "../cuda/capability.h"
#include "../cuda/decode/plan.h"
#include "../cuda/decode/workspace.h"
#include "cache_call.h"
#include "checks.h"
#include "families.h"
#include "fwd.h"
#include "pages.h"

namespace flash_attn {
namespace {

int64_t batch_of(const AttnArgs& attn) {
  return attn.is_varlen() ? attn.cu_seqlens_q->size(0) - 1 : attn.q.size(0);
}
int64_t tokens_of(const AttnArgs& attn) {
  return attn.is_varlen() ? value(attn.max_seqlen_q) : attn.q.size(1);
}

// Whether decode computes what the call asks for.
bool has_form_of_decode(const FwdArgs& args) {
  const AttnArgs& attn = args.attn;
  const bool varlen = attn.is_varlen();
  // Decode counts from the bottom right, which is all the same where nothing is counted.
  const bool counts = attn.causal || value(attn.window_left) >= 0 ||
                      value(attn.window_right) >= 0 || attn.alibi_slopes;
  const bool is_ragged = attn.seqused_q || attn.seqused_k || attn.leftpad_k;
  return !args.return_probs && !args.return_max_logits && !args.dropout_place &&
         attn.dropout_p == 0 && !(attn.top_left && counts) && !attn.mask_tiles &&
         !(varlen && attn.attn_bias) && varlen == (attn.cu_seqlens_k || attn.block_table) &&
         (varlen || !is_ragged);
}

// With more queries than that, calls of decode may get the forward's kernels, unless they have score
// terms: those would stay with decode, so they are left to the forward here.
constexpr int64_t kMostOfDecode = 16;

// Keys beside which queries are few.
constexpr int64_t kLeastKeys = 512, kKeysOfAQuery = 4;

// How many sequences of a varlen call have as many queries as the longest, by a guess, as lengths
// are on the device: as many as leave one to each of the others.
int64_t long_sequences(const AttnArgs& attn) {
  const int64_t total = attn.q.size(0), longest = tokens_of(attn);
  const int64_t count = longest > 1 ? (total - batch_of(attn)) / (longest - 1) : total;
  return std::max<int64_t>(count, 1);
}

// How many queries the short sequences of a varlen call have beside those.
int64_t queries_of_short_ones(const AttnArgs& attn) {
  const int64_t long_ones = long_sequences(attn);
  const int64_t short_ones = std::max<int64_t>(batch_of(attn) - long_ones, 1);
  const int64_t rest = std::max<int64_t>(attn.q.size(0) - long_ones * tokens_of(attn), 1);
  return std::bit_ceil(static_cast<uint64_t>((rest + short_ones - 1) / short_ones));
}

// Whether sequences differ so much in their queries that room for the longest of each would be
// wasted, or that short ones would waste much of the forward.
bool is_mixed(const AttnArgs& attn) {
  constexpr int64_t kMostRoom = 4;
  // A tile of the forward holds queries of one sequence and head, so a short sequence takes tiles as
  // a long one does. So many keys of tiles cost more time than decode's kernels take to begin.
  constexpr int64_t kMostTileKeys = 1 << 18;
  if (!attn.is_varlen() || (attn.alibi_slopes && attn.alibi_slopes->dim() > 1)) return false;
  if (batch_of(attn) * tokens_of(attn) > kMostRoom * attn.q.size(0)) return true;
  const int64_t short_ones = batch_of(attn) - long_sequences(attn);
  return tokens_of(attn) > kMostOfDecode &&
         short_ones * attn.q.size(1) * value(attn.max_seqlen_k) > kMostTileKeys;
}

// For how many queries of each sequence decode would have room. Where the guess is too low, all short
// sequences are left to the forward, which takes longer: so there is room for as many more as
// decode's rows have places for anyway, up to a few, since each is brought and sent back.
int64_t room_of(const AttnArgs& attn) {
  constexpr int64_t kMostSpare = 4;
  if (!is_mixed(attn)) return tokens_of(attn);
  const int64_t group = std::max<int64_t>(attn.q.size(1) / attn.k.size(-2), 1);
  const int64_t spare = std::clamp<int64_t>(cuda::kDecodeRows / group, 1, kMostSpare);
  return std::max(queries_of_short_ones(attn), spare);
}

// Whether there are so few queries beside the keys that decode may be the faster one.
bool has_few_queries(const AttnArgs& attn) {
  constexpr int64_t kMostSequences = 65'000, kMostMixed = 4096;  // one block deals out the latter
  const bool varlen = attn.is_varlen();
  const int64_t batch = batch_of(attn);
  if (batch < 1 || tokens_of(attn) < 1) return false;  // max_seqlen_q may be 0 beside queries
  if (batch > (is_mixed(attn) ? kMostMixed : kMostSequences)) return false;
  const int64_t tokens = room_of(attn);
  const int64_t keys = varlen ? value(attn.max_seqlen_k) : attn.k.size(1);
  if (keys < std::max(kLeastKeys, kKeysOfAQuery * tokens)) return false;
  // Of sequences that attend to themselves short ones have few keys, too.
  if (is_mixed(attn) && attn.cu_seqlens_k && attn.k.size(0) < kKeysOfAQuery * attn.q.size(0)) {
    return false;
  }
  const bool is_for_decode_alone =
      varlen || attn.attn_bias || attn.softcap > 0 || attn.alibi_slopes || attn.learnable_sink;
  return !is_for_decode_alone || tokens <= kMostOfDecode;
}

// Whether heads of a varlen call may share tiles of sm90's forward, which reads queries where they
// lie. Mixed calls of many queries may not: tiles for the longest sequence would be mostly empty for
// the short ones.
bool may_share_tiles(const AttnArgs& attn) {
  if (!attn.is_varlen() || batch_of(attn) < 1 || tokens_of(attn) > cuda::kForwardTileQueries) {
    return false;
  }
  const int64_t tokens = tokens_of(attn), keys = value(attn.max_seqlen_k);
  // One thread block of decode's reads the keys of a kv head once, too.
  if (tokens * (attn.q.size(1) / attn.k.size(-2)) <= cuda::kDecodeRows) return false;
  const bool reads_keys =
      !attn.block_table ||
      (!attn.leftpad_k &&
       fits_boxes(attn.k.size(1), window_to_params(attn.window_left), attn.top_left));
  return reads_keys && keys >= std::max(kLeastKeys, kKeysOfAQuery * tokens) &&
         (tokens <= kMostOfDecode || !is_mixed(attn));
}

DecodeArgs decode_args(const AttnArgs& attn, int64_t room) {
  DecodeArgs args = {.q = attn.q,
                     .k_cache = attn.k,
                     .v_cache = attn.v,
                     .cache_seqlens = attn.seqused_k,
                     .leftpad_k = attn.leftpad_k,
                     .block_table = attn.block_table,
                     .alibi_slopes = attn.alibi_slopes,
                     .learnable_sink = attn.learnable_sink,
                     .softmax_scale = attn.softmax_scale,
                     .causal = attn.causal,
                     .window_left = attn.window_left,
                     .window_right = attn.window_right,
                     .softcap = attn.softcap,
                     .num_splits = 0,
                     .batch_invariant = false,
                     .return_max_logits = false,
                     .attn_bias = attn.attn_bias};
  if (!attn.is_varlen()) return args;
  const int64_t batch = batch_of(attn);
  args.q = attn.q.narrow(0, 0, 1).unsqueeze(0).expand({batch, room, -1, -1});
  if (attn.cu_seqlens_k) {
    // Sequences side by side are rows of one cache, of which each has a part for its own.
    args.k_cache = attn.k.unsqueeze(0).expand({batch, -1, -1, -1});
    args.v_cache = attn.v.unsqueeze(0).expand({batch, -1, -1, -1});
  }
  return args;
}

// The call as one of decode, whose plan is not made yet. room: for so many queries of each sequence
// of a varlen call.
FewQueriesCall call_of_decode(const AttnArgs& attn, int64_t room) {
  FewQueriesCall call = {
      .args = decode_args(attn, room), .shape = {}, .plan = {}, .serves_all = true};
  call.shape = call_shape(call.args);
  if (attn.is_varlen()) call.shape.longest = value(attn.max_seqlen_k);
  return call;
}

// params become those of a forward of the sequences with more than `tokens` queries. numbers: room
// for them.
void leave_long(FwdParams& params, int tokens, const at::Tensor& numbers,
                const cuda::TileList& list, Stream stream) {
  const auto row = [&](int i) { return numbers[i].data_ptr<int32_t>(); };
  const cuda::LongSequences left = {.cu_seqlens_q = row(0),
                                    .cu_seqlens_k = row(1),
                                    .seqused_q = row(2),
                                    .seqused_k = row(3),
                                    .leftpad_k = row(4),
                                    .row = row(5),
                                    .list = list};
  cuda::run_deal_long(params, tokens, left, stream);
  params.cu_seqlens_q = left.cu_seqlens_q;
  params.seqused_q = left.seqused_q;
  params.seqused_k = left.seqused_k;
  if (params.leftpad_k != nullptr) params.leftpad_k = left.leftpad_k;
  if (params.cu_seqlens_k != nullptr) params.cu_seqlens_k = left.cu_seqlens_k;
  if (params.pages.entries != nullptr) params.cache_batch_idx = left.row;
}

FwdResult varlen_fwd(FewQueriesCall call, const FwdArgs& args) {
  AttnArgs attn = args.attn;
  attn.softmax_scale = resolved_scale(attn.softmax_scale, attn.q.size(-1));
  attn = readable(std::move(attn));
  FwdParams params = {};
  fill_params(params, attn, {});
  if (attn.block_table) fill_pages(params, attn);
  auto [out, lse] = empty_results(attn);
  set_results(params, out, lse);
  VarlenDecode decode(std::move(call), params, attn.q);
  decode.launch();
  decode.scatter(params, stream_of(out));
  return {out, lse, at::Tensor(), at::Tensor()};
}

}  // namespace

std::optional<FewQueriesCall> few_queries_call(const FwdArgs& args) {
  const AttnArgs& attn = args.attn;
  const bool has_numbers = attn.q.numel() > 0 && attn.k.numel() > 0 && attn.v.numel() > 0;
  const bool is_named = args.backend.has_value();
  const bool may_share = !is_named || *args.backend == name(Backend::kSm90);
  const bool may_be_decode = !is_named || *args.backend == name(Backend::kCuda);
  if (!(may_share || may_be_decode) || gpu_of(attn.q) == nullptr || !has_numbers ||
      !has_form_of_decode(args)) {
    return std::nullopt;
  }
  if (!is_readable(attn.q) || !is_readable(attn.k) || !is_readable(attn.v)) return std::nullopt;
  if (may_share && may_share_tiles(attn)) {
    FewQueriesCall call = call_of_decode(attn, tokens_of(attn));
    call.shape.gathers = true;
    call.plan = plan_call(families(), call.shape, args.backend);
    if (call.plan.tile_tokens > 0) return call;
  }
  if (!may_be_decode || !has_few_queries(attn)) return std::nullopt;
  FewQueriesCall call = call_of_decode(attn, room_of(attn));
  call.serves_all = !is_mixed(attn);
  if (attn.is_varlen()) call.shape.ragged = true;  // gets a leftpad (VarlenDecode)
  call.plan = plan_call(families(), call.shape, {});
  const bool cuts_keys = call.plan.splits.count > 1, shares_tiles = call.plan.tile_tokens > 0;
  const bool is_faster =
      call.plan.kernel != Kernel::kFwd || (!attn.is_varlen() && (cuts_keys || shares_tiles));
  if (call.plan.backend == Backend::kAten || !is_faster) return std::nullopt;
  if (is_named && (call.plan.backend != Backend::kCuda || !call.serves_all)) return std::nullopt;
  return call;
}

CallShape forward_shape(const FwdArgs& args, const FewQueriesCall* few) {
  CallShape call = call_shape(args);
  const AttnArgs& attn = args.attn;
  if (call.device == nullptr || !attn.is_varlen()) return call;
  const int64_t batch = batch_of(attn), longest = tokens_of(attn);
  if (batch < 1 || longest < 1) return call;
  int64_t keys = value(attn.max_seqlen_k);  // of the longest one
  const int64_t long_ones = long_sequences(attn);
  call.long_sequences = long_ones;
  call.long_tokens = longest;
  call.short_sequences = std::max<int64_t>(batch - long_ones, 0);
  call.short_tokens = queries_of_short_ones(attn);
  if (few != nullptr) call.decode_time = cuda::decode_time(few->shape);
  if (few != nullptr || keys >= std::max(kLeastKeys, kKeysOfAQuery * longest)) {
    // Its keys may be cut.
    constexpr int64_t kTile = cuda::kForwardTileQueries;
    const int64_t sequences = few != nullptr ? long_ones : batch;
    const int64_t tiles =
        std::min(sequences * ceil_div(longest, kTile), attn.q.size(0) / kTile + batch);
    call.batch = 1;
    call.tokens = tiles * kTile;
  } else if (attn.cu_seqlens_k) {
    keys = std::min(keys, ceil_div(attn.k.size(0), batch));  // on the mean
  }
  call.heads_q = attn.q.size(1);
  call.heads_kv = attn.k.size(-2);
  call.capacity = call.longest = keys;
  call.window_left = value(attn.window_left);
  return call;
}

FwdResult fwd_of_few_queries(FewQueriesCall call, const FwdArgs& args) {
  if (args.attn.is_varlen()) return varlen_fwd(std::move(call), args);
  auto [out, lse, max_logits] = decode_planned(call.shape, call.plan, call.args);
  return {out, lse, at::Tensor(), at::Tensor()};
}

ListedTiles::ListedTiles(const FwdParams& params, int queries_of_tile, const at::Tensor& like) {
  // Of sequences that do not overlap a head has no more tiles.
  const int64_t most_tiles = params.total_q / queries_of_tile + params.batch + 2;
  constexpr int64_t kTileInts = sizeof(cuda::ListedTile) / sizeof(int32_t);
  // The first place is for the two numbers.
  memory_ = at::empty({most_tiles + 1, kTileInts}, like.options().dtype(at::kInt));
  auto* const numbers = memory_.data_ptr<int32_t>();
  list_ = {.tile_counter = numbers,
           .num_tiles = numbers + 1,
           .tiles = reinterpret_cast<cuda::ListedTile*>(numbers + kTileInts),
           .most_tiles = static_cast<int>(most_tiles),
           .queries_of_tile = queries_of_tile};
}

VarlenDecode::VarlenDecode(FewQueriesCall call, FwdParams& params, const at::Tensor& like,
                           int tile_tokens)
    : call_(std::move(call)), tokens_(static_cast<int>(call_.args.q.size(1))), whole_(params) {
  const auto ints = like.options().dtype(at::kInt);
  if (!call_.serves_all) {
    long_ones_ = at::empty({6, params.batch + 1}, ints);
    long_tiles_.emplace(params, tile_tokens, like);
    leave_long(params, tokens_, long_ones_, long_tiles_->list(), stream_of(like));
  }
  call_.args.q = at::empty(call_.args.q.sizes(), like.options());
  ends_ = at::empty({2, params.batch}, ints);
  call_.args.leftpad_k = ends_[0];
  call_.args.cache_seqlens = ends_[1];
}

void VarlenDecode::launch() {
  DecodeArgs& args = call_.args;
  cuda::run_gather_queries(whole_,
                           {.q = args.q.data_ptr(),
                            .first = args.leftpad_k->data_ptr<int32_t>(),
                            .end = args.cache_seqlens->data_ptr<int32_t>(),
                            .tokens = tokens_,
                            .leaves_long = !call_.serves_all},
                           stream_of(args.q));
  results_ = decode_planned(call_.shape, call_.plan, args);
}

void VarlenDecode::scatter(const FwdParams& results, Stream stream) const {
  FwdParams params = whole_;
  params.out = results.out;
  params.out_strides = results.out_strides;
  params.lse = results.lse;
  params.lse_batch_stride = results.lse_batch_stride;
  params.lse_head_stride = results.lse_head_stride;
  const auto& [out, lse, max_logits] = results_;
  cuda::run_scatter_results(params,
                            {.out = out.const_data_ptr(),
                             .lse = lse.const_data_ptr<float>(),
                             .tokens = tokens_,
                             .leaves_long = !call_.serves_all},
                            stream);
}

}  // namespace flash_attn
