#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "../cuda/decode/decode.h"
#include "../cuda/side_stream.h"
#include "../sm80/fwd.h"
#include "../sm90/fwd.h"
#include "checks.h"
#include "few_queries.h"
#include "fwd.h"
#include "key_mask.h"
#include "mask.h"
#include "pages.h"

namespace flash_attn {
namespace {

// sm90's kernels deal out tiles by a counter; the result holds it. With pages it may be there
// (DealtSequences).
at::Tensor start_tile_counter(FwdParams& params, const at::Tensor& out) {
  if (params.tile_counter != nullptr) return {};
  at::Tensor tile_counter = at::empty({1}, out.options().dtype(at::kInt));
  params.tile_counter = tile_counter.data_ptr<int32_t>();
  return tile_counter;
}

void launch_masked(const Plan& plan, FwdParams& params, const AttnArgs& attn,
                   const at::Tensor& out) {
  if (plan.backend == Backend::kSm80) {
    return sm80::run_fwd_masked({params, tile_mask_params(attn)}, stream_of(out));
  }
  const at::Tensor tile_counter = start_tile_counter(params, out);
  const Masked<FwdParams> masked = {params, tile_mask_params(attn)};
  const at::Tensor order = at::empty({sm90::mask_order_size(masked)}, tile_counter.options());
  sm90::run_fwd_masked(masked, order.data_ptr<int32_t>(), *plan.device, stream_of(out));
}

sm90::PackedHeads packed_heads(const Plan& plan) {
  if (plan.tile_tokens == 0) return {};
  return {.token_bits = std::countr_zero(static_cast<unsigned>(plan.tile_tokens))};
}

// A varlen forward in pieces, and what of it has to live until its kernels are launched.
struct InPieces {
  sm90::FwdInPieces params;
  at::Tensor workspace;

  // The plan may have them in one piece: then there is nothing to merge.
  InPieces(const Plan& plan, const FwdParams& call, const at::Tensor& lse)
      : params{.packed = packed_heads(plan)} {
    static_cast<FwdParams&>(params) = call;
    params.num_splits = plan.splits.count;
    if (params.num_splits == 1) return;
    const int64_t rows = plan.splits.count * params.heads_q * params.total_q;
    workspace = at::empty({rows, params.head_dim_v + 1}, lse.options());
    params.partial.o = workspace.data_ptr<float>();
    params.partial.lse = params.partial.o + rows * params.head_dim_v;
  }

  // By decode's kernel, for which all sequences are one.
  void merge(const Plan& plan, Stream stream) const {
    if (params.num_splits == 1) return;
    DecodeParams merge = {};
    merge.dtype = params.dtype;
    merge.batch = 1;
    merge.heads_q = params.heads_q;
    merge.seqlen_q = static_cast<int>(params.total_q);
    merge.head_dim_v = params.head_dim_v;
    merge.splits = plan.splits;
    merge.partial = params.partial;
    merge.out = params.out;
    merge.out_strides = params.out_strides;
    merge.lse = params.lse;
    cuda::run_decode_combine(merge, stream);
  }
};

// The list's tiles, and the counter by which they are dealt out. No sequence is longer than all,
// whatever the caller says.
void take_tiles(sm90::FwdInPieces& params, const cuda::TileList& list, int first_sms) {
  params.seqlen_q = static_cast<int>(params.total_q);
  params.tile_counter = list.tile_counter;
  params.list = {.tiles = list.tiles, .num_tiles = list.num_tiles, .first_sms = first_sms};
}

void launch_in_pieces(const Plan& plan, const FwdParams& call, const at::Tensor& out,
                      const at::Tensor& lse) {
  const Stream stream = stream_of(out);
  InPieces pieces(plan, call, lse);
  at::Tensor tile_counter;
  std::optional<ListedTiles> tiles;
  if (plan.lists_tiles) {
    tiles.emplace(call, pieces.params.packed.tokens(), out);
    cuda::run_list_tiles(call, tiles->list(), stream);
    take_tiles(pieces.params, tiles->list(), plan.device->num_sms);
  } else {
    tile_counter = start_tile_counter(pieces.params, out);
  }
  sm90::run_fwd_in_pieces(pieces.params, *plan.device, stream);
  pieces.merge(plan, stream);
}

// The forward of the long sequences beside decode of the short ones. Decode waits for memory, which
// half of the multiprocessors keep as busy as all of them, and the forward for its tensor cores. So
// the other half begins with the forward's tiles, and decode's half takes part when decode has ended.
void launch_beside(const Plan& plan, const FwdParams& call, VarlenDecode& decode,
                   const at::Tensor& out, const at::Tensor& lse) {
  const Stream stream = stream_of(out);
  InPieces pieces(plan, call, lse);
  cuda::DeviceInfo first = *plan.device, second = first;
  first.num_sms /= 2;
  second.num_sms -= first.num_sms;
  take_tiles(pieces.params, decode.long_tiles(), first.num_sms);
  pieces.params.list.runs_beside = true;
  pieces.params.cache_batch_idx = nullptr;  // the list has a sequence's own number

  // The forward has to come first, as thread blocks of decode keep their places. While decode's
  // queries are gathered it does.
  cuda::SideStream side(stream);
  sm90::run_fwd_in_pieces(pieces.params, first, side.stream());
  decode.launch();
  pieces.params.list.is_second = true;
  sm90::run_fwd_in_pieces(pieces.params, second, stream);
  // A merge writes all rows, whereas one piece leaves others alone.
  const bool merges = pieces.params.num_splits > 1;
  if (!merges) decode.scatter(call, stream);
  side.join();
  pieces.merge(plan, stream);
  if (merges) decode.scatter(call, stream);
}

// return_max_logits beside terms that change the scores whose maxima the kernels keep: one call with
// the terms, and one without them for the logits alone. Of the terms only an additive bias hides
// keys, so that as a mask it stays. Two calls take kernels that are there already, of whichever
// backends serve each best.
FwdResult with_max_logits_apart(FwdArgs args) {
  FwdArgs plain = args;
  plain.attn.softcap = plain.attn.dropout_p = 0;
  plain.attn.alibi_slopes.reset();
  plain.attn.rng_state.reset();
  plain.dropout_place.reset();
  OptTensor& bias = plain.attn.attn_bias;
  if (bias && bias->scalar_type() != at::kBool) bias = seen_with_bias(*bias);
  at::Tensor max_logits = std::get<3>(fwd_wanted(plain));
  args.return_max_logits = false;
  FwdResult results = fwd_wanted(args);
  std::get<3>(results) = std::move(max_logits);
  return results;
}

// few: the sequences that decode serves, or none.
FwdResult run(const Plan& plan, const FwdArgs& args, AttnArgs attn,
              std::optional<FewQueriesCall> few) {
  const int64_t head_dim_v = attn.v.size(-1);
  attn.softmax_scale = resolved_scale(attn.softmax_scale, attn.q.size(-1));
  attn = readable(std::move(attn));
  const at::Tensor& q = attn.q;

  auto [out, lse] = empty_results(attn);
  at::Tensor max_logits;
  if (args.return_max_logits) max_logits = start_max_logits(q, true);
  if (q.numel() == 0 || attn.k.numel() == 0) {
    out.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
  } else {
    FwdParams params = {};
    fill_params(params, attn, args.dropout_place);
    params.score = score_params(attn);
    if (max_logits.defined()) params.max_logits = max_logits.data_ptr<float>();
    if (attn.block_table) fill_pages(params, attn);
    std::optional<VarlenDecode> decode;
    if (few) decode.emplace(*std::move(few), params, q, packed_heads(plan).tokens());
    set_results(params, out, lse);
    if (decode && plan.runs_beside) {
      launch_beside(plan, params, *decode, out, lse);
    } else {
      std::optional<DealtSequences> dealt;
      if (!attn.block_table) {
        dealt = deal_out(params, params.score, attn);
      } else if (!runs_in_pieces(plan)) {
        dealt.emplace(params, q);
      }
      if (decode) decode->launch();
      if (plan.skips_tiles) {
        launch_masked(plan, params, attn, out);
      } else if (runs_in_pieces(plan)) {
        launch_in_pieces(plan, params, out, lse);
      } else {
        launch_fwd(plan, params, out);
      }
      if (dealt) sm80::run_fwd_of_sequences(dealt->rest(params), stream_of(out));
      if (decode) decode->scatter(params, stream_of(out));
    }
  }
  if (out.size(-1) != head_dim_v) out = out.narrow(-1, 0, head_dim_v).contiguous();
  return {out, lse, at::Tensor(), max_logits};
}

}  // namespace

std::pair<at::Tensor, at::Tensor> empty_results(const AttnArgs& args) {
  const at::Tensor& q = args.q;
  auto out_sizes = q.sizes().vec();
  out_sizes.back() = args.v.size(-1);
  const auto lse_options = q.options().dtype(at::kFloat);
  return {at::empty(out_sizes, q.options()),
          args.is_varlen() ? at::empty({q.size(1), q.size(0)}, lse_options)
                           : at::empty({q.size(0), q.size(2), q.size(1)}, lse_options)};
}

void set_results(FwdParams& params, const at::Tensor& out, const at::Tensor& lse) {
  params.out = out.data_ptr();
  params.out_strides = strides_of(out);
  params.lse = lse.data_ptr<float>();
  params.lse_batch_stride = lse.dim() == 2 ? 0 : lse.stride(0);
  params.lse_head_stride = lse.stride(-2);
}

bool runs_in_pieces(const Plan& plan) {
  return plan.backend == Backend::kSm90 &&
         (plan.splits.count > 1 || plan.tile_tokens > 0 || plan.lists_tiles);
}

void launch_fwd(const Plan& plan, FwdParams& params, const at::Tensor& out) {
  if (plan.backend == Backend::kSm80) {
    return sm80::run_fwd(params, *plan.device, stream_of(out));
  }
  const at::Tensor tile_counter = start_tile_counter(params, out);
  if (!runs_in_pieces(plan)) return sm90::run_fwd(params, *plan.device, stream_of(out));
  sm90::run_fwd_in_pieces({params, {}, packed_heads(plan)}, *plan.device, stream_of(out));
}

FwdResult fwd_wanted(const FwdArgs& args) {
  check(args);
  check_max_seqlens(args.attn);
  const c10::DeviceGuard guard(args.attn.q.device());
  std::optional<FewQueriesCall> few = few_queries_call(args);
  const bool shares_tiles = few && few->plan.tile_tokens > 0 && args.attn.is_varlen();
  if (few && few->serves_all && !shares_tiles) return fwd_of_few_queries(*std::move(few), args);
  const Plan plan = shares_tiles
                        ? few->plan
                        : make_plan(forward_shape(args, few ? &*few : nullptr), args.backend);
  if (shares_tiles || plan.lists_tiles) few.reset();
  if (plan.max_logits_apart) return with_max_logits_apart(args);
  AttnArgs attn = plan.skips_tiles ? args.attn : with_bool_mask(args.attn);
  // Without keys a sink is all that LSE consists of, and no kernel is launched.
  const bool only_sink = args.attn.learnable_sink && args.attn.k.numel() == 0;
  if (plan.backend == Backend::kAten || only_sink) {
    aten::Args call = to_aten(attn, args.dropout_place);
    call.wants_max_logits = args.return_max_logits;
    return aten::fwd(call, args.return_probs);
  }
  return run(plan, args, std::move(attn), std::move(few));
}

FwdResult fwd(const FwdArgs& args) {
  FwdResult results = fwd_wanted(args);
  auto& [out, lse, probs, max_logits] = results;
  if (!probs.defined()) probs = at::empty({0}, out.options());
  if (!max_logits.defined()) max_logits = at::empty({0}, lse.options());
  return results;
}

}  // namespace flash_attn
