#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "../cuda/bwd.h"
#include "../sm80/bwd.h"
#include "../sm90/bwd.h"
#include "bwd_parts.h"
#include "checks.h"
#include "key_mask.h"
#include "mask.h"
#include "to_params.h"

namespace flash_attn {
namespace {

// dx in the shape that the caller's x had before padding.
at::Tensor unpadded(const at::Tensor& dx, int64_t head_dim) {
  return dx.size(-1) == head_dim ? dx : dx.narrow(-1, 0, head_dim).contiguous();
}

bool is_of_places(const BiasGradientParams& gradient) {
  using Form = BiasGradientParams::Form;
  return gradient.form == Form::kWhole || gradient.form == Form::kShared;
}

// Whether sm90's kernel behind the backward computes the gradient of the bias.
bool has_bias_kernel(const Plan& plan, const BwdParams& params) {
  return plan.backend == Backend::kSm90 && is_of_places(params.dbias) &&
         !sm90::stores_bias_gradient(params) && sm90::computes_bias_gradient(params);
}

// Where the kernels leave the gradient of the bias, or what is to be summed further, as zeros if
// they do not write all of it; undefined if nothing is wanted. attn: readable().
at::Tensor start_bias_gradient(const Plan& plan, BwdParams& params, const AttnArgs& attn,
                               bool wanted) {
  if (!wanted || !attn.attn_bias || attn.attn_bias->scalar_type() == at::kBool) return {};
  using Form = BiasGradientParams::Form;
  const at::Tensor& bias = *attn.attn_bias;
  const auto fp32 = bias.options().dtype(at::kFloat);
  BiasGradientParams& gradient = params.dbias;
  at::Tensor sums;
  // A bias of a dense call's only key has dS for a gradient. The sum over a row's keys, which needs
  // no dS, is the same number from delta alone, and less exact where a sink has most of the row:
  // delta counts on an out that was rounded.
  const bool of_one_key =
      params.cu_seqlens_k == nullptr && params.seqlen_k == 1 && bias.size(2) == params.seqlen_q;
  if (bias.size(3) == 1 && !of_one_key) {
    gradient.form = Form::kRows;
    sums = at::empty({params.batch, params.heads_q, params.seqlen_q, 1}, fp32);
  } else if (bias.size(2) == 1 && !of_one_key) {
    gradient.form = Form::kKeys;
    sums = at::empty({params.batch, params.heads_q, 1, bias.size(3)}, fp32);
  } else {
    const bool shared = bias.size(0) < params.batch || bias.size(1) < params.heads_q;
    gradient.form = shared ? Form::kShared : Form::kWhole;
    sums = at::empty(bias.sizes(), bias.options());
  }
  gradient.data = sums.data_ptr();
  gradient.dtype = dtype_of(sums);
  gradient.rows = static_cast<int>(sums.size(2));
  gradient.keys = static_cast<int>(sums.size(3));
  gradient.batch_stride = sums.size(0) < params.batch ? 0 : sums.stride(0);
  gradient.head_stride = sums.size(1) < params.heads_q ? 0 : sums.stride(1);
  if (!has_bias_kernel(plan, params)) sums.zero_();
  return sums;
}

at::Tensor fp32_like(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options().dtype(at::kFloat));
}

void write_key_gradients_to(const at::Tensor& dk, const at::Tensor& dv, BwdParams& params) {
  params.dk = dk.data_ptr();
  params.dv = dv.data_ptr();
  params.dk_strides = strides_of(dk);
  params.dv_strides = strides_of(dv);
}

// Makes those gradients fp32 that are wanted so and that the kernels of this call can write so.
void widen_gradients(BwdParams& params, const Plan& plan, const BwdArgs& args, at::Tensor& dq,
                     at::Tensor& dk, at::Tensor& dv) {
  // Of fp32 all are. Where sequences are dealt out, the kernels of some write 16 bits alone.
  if (params.dtype == DType::kFp32 || deals_out_sequences(args.attn)) return;
  const bool on_sm90 = plan.backend == Backend::kSm90;
  // Sums in memory are converted by a kernel of their own. But sm90's of a mask may be a pool, whose
  // kernel rounds them itself, and sm80's deterministic backward has none.
  const bool has_sums = on_sm90 ? !plan.skips_tiles : !params.deterministic;
  params.wide_query_gradient = args.wide_query_gradient && has_sums;
  if (params.wide_query_gradient) dq = fp32_like(dq);
  params.wide_key_gradients = args.wide_key_gradients && on_sm90 && !plan.skips_tiles &&
                              sm90::writes_wide_key_gradients(params);
  if (params.wide_key_gradients) {
    dk = fp32_like(dk);
    dv = fp32_like(dv);
  }
}

using Gradients = std::array<at::Tensor, 3>;  // dq, dk, dv

// The shape of `packed` tensors like x, side by side.
std::vector<int64_t> packed_sizes(const at::Tensor& x, int packed) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.insert(sizes.end() - 2, packed);
  return sizes;
}

// The last gradients are those that lie in `all` side by side.
void take_last(Gradients& gradients, const at::Tensor& all) {
  const std::vector<at::Tensor> parts = all.unbind(-3);
  std::copy_backward(parts.begin(), parts.end(), gradients.end());
}

// Says how many rows the sums of dq have.
void set_dq_accum_rows(BwdParams& params) {
  params.dq_accum_sequence_rows = cuda::bwd_dq_accum_sequence_rows(params);
  params.dq_accum_rows = cuda::bwd_dq_accum_rows(params);
}

// Room for the sums of so many heads, whose rows and columns are said.
at::Tensor place_dq_accum(BwdParams& params, int64_t heads, const at::Tensor& lse) {
  at::Tensor sums = at::empty({heads, params.dq_accum_rows, params.dq_accum_cols}, lse.options());
  params.dq_accum = sums.data_ptr<float>();
  return sums;
}

// What the kernels need room for, and then their launches. A part has its sums already.
void launch_sm80(BwdParams& params, const Plan& plan, const AttnArgs& attn, const at::Tensor& lse) {
  at::Tensor dq_accum;
  if (!params.deterministic && !params.is_part) {
    set_dq_accum_rows(params);
    params.dq_accum_cols = sm80::bwd_dq_accum_cols(params, plan.skips_tiles);
    dq_accum = place_dq_accum(params, params.heads_q, lse);
  }
  if (plan.skips_tiles) {
    return sm80::run_bwd_masked({params, tile_mask_params(attn)}, stream_of(lse));
  }
  sm80::run_bwd(params, *plan.device, stream_of(lse));
}

void launch_sm90(BwdParams& params, const Plan& plan, const AttnArgs& attn, const at::Tensor& lse) {
  const at::Tensor& q = attn.q;
  const DeviceInfo& device = *plan.device;
  const auto numbers = lse.options().dtype(at::kInt);
  if (!plan.skips_tiles) params.splits = sm90::bwd_splits(params, device);
  const bool dq_apart = !plan.skips_tiles && sm90::computes_dq_apart(params, device);
  const bool has_turns = params.deterministic && !dq_apart;
  at::Tensor dq_accum, progress, turns;
  if (!dq_apart && !params.is_part) {
    DqPool& pool = params.dq_pool;
    pool = sm90::bwd_dq_pool(params, device, plan.skips_tiles);
    set_dq_accum_rows(params);
    if (pool.places > 0) params.dq_accum_rows = sm90::bwd_dq_pool_rows(params, pool);
    const int group = params.heads_q / params.heads_kv;
    const int heads = pool.places > 0 ? pool.places * group : params.heads_q;
    params.dq_accum_cols = sm90::bwd_dq_accum_cols(params, plan.skips_tiles);
    dq_accum = place_dq_accum(params, heads, lse);
    pool.end = params.dq_accum + dq_accum.numel();
    if (pool.places > 0) {
      progress = at::empty({cuda::bwd_dq_pool_progress(params)}, numbers);
      pool.progress = progress.data_ptr<int32_t>();
    }
  }
  const at::Tensor tile_counter = at::empty({1}, numbers);
  params.tile_counter = tile_counter.data_ptr<int32_t>();
  if (plan.skips_tiles) {
    const Masked<BwdParams> masked = {params, tile_mask_params(attn)};
    const at::Tensor order = at::empty({sm90::mask_order_size(masked)}, numbers);
    return sm90::run_bwd_masked(masked, order.data_ptr<int32_t>(), device, stream_of(q));
  }
  at::Tensor split_sums, split_arrivals;
  if (params.splits.count > 1) {
    split_sums = at::empty({params.splits.num_sums}, lse.options());
    split_arrivals = at::empty({params.splits.num_arrivals}, numbers);
    params.splits.sums = split_sums.data_ptr<float>();
    params.splits.arrived = split_arrivals.data_ptr<int32_t>();
  }
  if (has_turns) {
    turns = at::empty({cuda::bwd_dq_turns(params)}, numbers);
    params.dq_turns = turns.data_ptr<int32_t>();
  }
  sm90::run_bwd(params, device, stream_of(q));
  if (has_bias_kernel(plan, params)) {
    sm90::run_bwd_bias(params, device, stream_of(q));
  } else if (is_of_places(params.dbias) && !sm90::stores_bias_gradient(params)) {
    sm80::run_bwd_bias(params, stream_of(q));
  }
}

void launch(const Plan& plan, BwdParams& params, const AttnArgs& attn, const at::Tensor& lse) {
  at::Tensor delta;
  if (!params.is_part) {
    delta = at::empty_like(lse);
    params.delta = delta.data_ptr<float>();
  }
  const std::optional<DealtSequences> dealt = deal_out(params, params.score, attn);
  std::optional<OfSequences<BwdParams>> rest;
  if (dealt) rest = dealt->rest(params);  // before there is a workspace: it needs none
  plan.backend == Backend::kSm90 ? launch_sm90(params, plan, attn, lse)
                                 : launch_sm80(params, plan, attn, lse);
  if (rest) sm80::run_bwd_of_sequences(*rest, stream_of(lse));
}

// Where dout, out and the LSE lie. The tensors are readable() and contiguous.
void point_to_results(BwdParams& params, const at::Tensor& dout, const OptTensor& dlse,
                      const at::Tensor& out, const at::Tensor& lse) {
  params.out = out.const_data_ptr();
  params.dout = dout.const_data_ptr();
  params.out_strides = strides_of(out);
  params.dout_strides = strides_of(dout);
  params.lse = lse.const_data_ptr<float>();
  params.dlse = dlse ? dlse->const_data_ptr<float>() : nullptr;
  params.lse_batch_stride = lse.dim() == 2 ? 0 : lse.stride(0);  // varlen: (heads_q, total_q)
  params.lse_head_stride = lse.stride(-2);
}

// A call's tensors as the kernels read them, and what follows from them.
struct ReadableCall {
  AttnArgs attn;
  at::Tensor dout, out, lse;
  OptTensor dlse;
  BwdParams params;

  explicit ReadableCall(const BwdArgs& args)
      : attn(args.attn),
        dout(readable(args.dout)),
        out(readable(args.out)),
        lse(args.softmax_lse.contiguous()),
        dlse(contiguous(args.dlse)) {
    attn.softmax_scale = resolved_scale(attn.softmax_scale, attn.q.size(-1));
    attn = readable(std::move(attn));
  }
  void fill(const OptPlace& dropout_place) {
    fill_params(params, attn, dropout_place);
    params.score = score_params(attn);
    point_to_results(params, dout, dlse, out, lse);
    params.deterministic = is_deterministic(attn);
  }
};

BwdResult run(const Plan& plan, const BwdArgs& args, int packed) {
  const int64_t head_dim = args.attn.q.size(-1), head_dim_v = args.attn.v.size(-1);
  ReadableCall call(args);
  const AttnArgs& attn = call.attn;

  const auto contiguous_like = [](const at::Tensor& tensor) {
    return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
  };
  Gradients gradients;
  at::Tensor side_by_side;
  if (packed > 0) {
    side_by_side = at::empty(packed_sizes(attn.v, packed), attn.v.options());
    take_last(gradients, side_by_side);
  }
  auto& [dq, dk, dv] = gradients;
  if (!dq.defined()) dq = contiguous_like(attn.q);
  if (!dk.defined()) dk = contiguous_like(attn.k);
  if (!dv.defined()) dv = contiguous_like(attn.v);
  // Results of an op must not share memory, so each that is not wanted is an empty tensor of its
  // own.
  const auto none = [&] { return at::empty({0}, attn.q.options()); };
  at::Tensor dsink =
      args.grad_mask[4] && attn.learnable_sink ? at::zeros_like(*attn.learnable_sink) : none();
  at::Tensor dbias = none();
  if (attn.q.numel() == 0 || attn.k.numel() == 0) {
    for (at::Tensor* gradient : {&dq, &dk, &dv}) gradient->zero_();
    if (args.grad_mask[3] && args.attn.attn_bias) {
      dbias = at::zeros(args.attn.attn_bias->sizes(), args.attn.attn_bias->options());
    }
  } else {
    call.fill(args.dropout_place);
    BwdParams& params = call.params;
    widen_gradients(params, plan, args, dq, dk, dv);
    params.dq = dq.data_ptr();
    params.dq_strides = strides_of(dq);
    write_key_gradients_to(dk, dv, params);
    params.dsink = dsink.numel() > 0 ? dsink.data_ptr<float>() : nullptr;
    const at::Tensor sums = start_bias_gradient(plan, params, attn, args.grad_mask[3]);
    launch(plan, params, attn, call.lse);
    if (sums.defined()) {
      dbias = sums.sum_to_size(attn.attn_bias->sizes())
                  .to(args.attn.attn_bias->scalar_type())
                  .view(args.attn.attn_bias->sizes());
    }
  }
  if (dsink.numel() > 0) dsink = dsink.to(args.attn.learnable_sink->scalar_type());
  if (packed > 0 && side_by_side.size(-1) != head_dim_v) {
    take_last(gradients, unpadded(side_by_side, head_dim_v));
  }
  const auto wanted = [&](int which, const at::Tensor& gradient, int64_t size) {
    return args.grad_mask[which] ? unpadded(gradient, size) : none();
  };
  return {wanted(0, dq, head_dim), wanted(1, dk, head_dim), wanted(2, dv, head_dim_v), dbias,
          dsink};
}

BwdResult run_aten(const BwdArgs& args, int packed) {
  Gradients into;
  if (packed > 0) {
    take_last(into, at::zeros(packed_sizes(args.attn.v, packed), args.attn.v.options()));
  }
  aten::Grads grads = aten::bwd(to_aten(args.attn, args.dropout_place), args.dout, args.dlse,
                                args.out, args.softmax_lse, args.grad_mask, into);
  return {grads.dq, grads.dk, grads.dv, grads.dbias, grads.dsink};
}

}  // namespace

BwdResult bwd(const BwdArgs& args) { return bwd_packed(args, 0); }

BwdResult bwd_packed(const BwdArgs& given, int packed) {
  check(given);
  check_max_seqlens(given.attn);
  const c10::DeviceGuard guard(given.attn.q.device());
  const Plan plan = make_plan(call_shape(given), given.backend);
  BwdArgs args = given;
  if (!plan.skips_tiles) args.attn = with_bool_mask(std::move(args.attn));
  // As in the forward: without keys, no kernel runs, but a sink has its gradient through LSE.
  const bool only_sink = args.attn.learnable_sink && args.attn.k.numel() == 0;
  const bool on_kernels = plan.backend != Backend::kAten && !only_sink;
  BwdResult result = on_kernels ? run(plan, args, packed) : run_aten(args, packed);
  // Some kernels write 16 bits alone.
  const auto widen = [](at::Tensor& gradient) {
    if (gradient.scalar_type() != at::kDouble) gradient = gradient.to(at::kFloat);
  };
  if (args.wide_query_gradient) widen(std::get<0>(result));
  if (args.wide_key_gradients) {
    widen(std::get<1>(result));
    widen(std::get<2>(result));
  }
  return result;
}

BwdParts::BwdParts(at::Tensor dout, OptTensor dlse, at::Tensor out, at::Tensor softmax_lse)
    : dout_(std::move(dout)),
      out_(std::move(out)),
      lse_(std::move(softmax_lse)),
      dlse_(std::move(dlse)) {
  TORCH_CHECK(dout_.dim() == 4 && dout_.sizes() == out_.sizes(),
              "flash_attn: dout: expected out's shape (batch, seqlen_q, heads_q, head_dim_v), ",
              out_.sizes(), ", got ", dout_.sizes());
  whole_.batch = static_cast<int>(out_.size(0));
  whole_.seqlen_q = static_cast<int>(out_.size(1));
  whole_.heads_q = static_cast<int>(out_.size(2));
  whole_.total_q = out_.size(0) * out_.size(1);
}

bool BwdParts::fits(const BwdParams& part, bool by_sm90, int cols) const {
  return !has_sums() ||
         (by_sm90 == by_sm90_ && cols == whole_.dq_accum_cols && part.head_dim == whole_.head_dim &&
          part.dtype == whole_.dtype && part.softmax_scale == whole_.softmax_scale &&
          part.dropout.scale == whole_.dropout.scale);
}

void BwdParts::start(const BwdParams& part, bool by_sm90, int cols) {
  by_sm90_ = by_sm90;
  whole_.dtype = part.dtype;
  whole_.head_dim = part.head_dim;
  whole_.softmax_scale = part.softmax_scale;
  whole_.dropout = part.dropout;
  set_dq_accum_rows(whole_);
  whole_.dq_accum_cols = cols;
  const at::Tensor dout = readable(dout_), out = readable(out_), lse = lse_.contiguous();
  const OptTensor dlse = contiguous(dlse_);
  sums_ = place_dq_accum(whole_, whole_.heads_q, lse);
  delta_ = at::empty_like(lse);
  BwdParams call = whole_;
  call.head_dim_v = static_cast<int>(out.size(-1));
  call.delta = delta_.data_ptr<float>();
  point_to_results(call, dout, dlse, out, lse);
  cuda::run_bwd_delta(call, stream_of(lse));
}

std::optional<BwdParts::KeyGradients> BwdParts::add(int64_t first_row, BwdArgs args) {
  check(args);
  const at::Tensor &q = args.attn.q, &k = args.attn.k;
  TORCH_CHECK(q.dim() == 4 && q.size(0) == whole_.batch && q.size(2) == whole_.heads_q &&
                  first_row >= 0 && first_row + q.size(1) <= whole_.seqlen_q,
              "flash_attn: q: expected a dense part of ", whole_.batch, " sequences of ",
              whole_.seqlen_q, " queries and ", whole_.heads_q, " heads, got ", q.sizes(),
              " from row ", first_row, " on");
  const c10::DeviceGuard guard(q.device());
  const Plan plan = make_plan(call_shape(args), args.backend);
  const bool by_sm90 = plan.backend == Backend::kSm90;
  const bool has_sums = by_sm90 || (plan.backend == Backend::kSm80 && !is_deterministic(args.attn));
  const bool starts_block = first_row % BwdParams::kPartMultiple == 0;
  if (!has_sums || plan.skips_tiles || !starts_block || q.numel() == 0 || k.numel() == 0) return {};

  ReadableCall call(args);
  call.fill(args.dropout_place);
  BwdParams& params = call.params;
  params.is_part = params.wide_query_gradient = true;
  params.wide_key_gradients =
      by_sm90 && sm90::writes_wide_key_gradients(params);  // fp32 is no dtype of sm90's
  const int cols = by_sm90 ? sm90::bwd_dq_accum_cols(params, /*masked=*/false)
                           : sm80::bwd_dq_accum_cols(params, /*masked=*/false);
  if (!fits(params, by_sm90, cols)) return {};
  if (!this->has_sums()) start(params, by_sm90, cols);

  params.dq_accum = whole_.dq_accum + first_row * cols;
  params.dq_accum_rows = whole_.dq_accum_rows;
  params.dq_accum_sequence_rows = whole_.dq_accum_sequence_rows;
  params.dq_accum_cols = cols;
  const at::Tensor delta = delta_.narrow(-1, first_row, q.size(1)).contiguous();
  params.delta = delta.data_ptr<float>();
  const auto gradient_of = [&](const at::Tensor& x) {
    const auto dtype = params.wide_key_gradients ? at::kFloat : x.scalar_type();
    return at::empty(x.sizes(), x.options().dtype(dtype));
  };
  const at::Tensor dk = gradient_of(call.attn.k), dv = gradient_of(call.attn.v);
  write_key_gradients_to(dk, dv, params);
  launch(plan, params, call.attn, call.lse);
  return KeyGradients(unpadded(dk, k.size(-1)).to(at::kFloat),
                      unpadded(dv, args.attn.v.size(-1)).to(at::kFloat));
}

void BwdParts::store(const at::Tensor& dq) const {
  if (!has_sums()) {
    dq.zero_();
    return;
  }
  const c10::DeviceGuard guard(dq.device());
  std::vector<int64_t> sizes = dq.sizes().vec();
  sizes.back() = whole_.head_dim;
  const bool in_place = is_readable(dq);
  const at::Tensor rows = in_place ? dq : at::empty(sizes, dq.options());
  BwdParams params = whole_;
  params.dq = rows.data_ptr();
  params.dq_strides = strides_of(rows);
  params.wide_query_gradient = dq.scalar_type() == at::kFloat;
  by_sm90_ ? sm90::run_bwd_dq_of_parts(params, stream_of(dq))
           : sm80::run_bwd_dq_of_parts(params, stream_of(dq));
  if (!in_place) dq.copy_(rows.narrow(-1, 0, dq.size(-1)));
}

std::optional<BwdParts::KeyGradients> add_part(BwdParts& parts, int64_t first_row, BwdArgs args) {
  return parts.add(first_row, std::move(args));
}

}  // namespace flash_attn
