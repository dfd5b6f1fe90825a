// Backward, after FlashAttention-2: nothing of the size of S was kept, so each tile of P is
// computed again from Q, K and LSE.
//
//   δ_i = rowsum(dO_i ∘ O_i) − dLSE_i                 = Σ_j P_ij dP_ij, less what LSE passes on
//   for each block of keys j
//     for each block of rows i that sees keys j
//       S   = scale · Q_i K_jᵀ                        softcap, bias, ALiBi; −inf where masked
//       P   = exp(S − LSE_i)
//       dV_j += dropout(P)ᵀ dO_i
//       dP  = dropout(dO_i V_jᵀ)
//       dS  = P ∘ (dP − δ_i)                          dBias += dS
//       dQ_i += scale · dS K_j
//       dK_j += scale · dSᵀ Q_i
//   dSink = −Σ_i exp(sink − LSE_i) δ_i                a key whose value is 0: dP = 0
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <optional>
#include <vector>

#include "aten/attention.h"
#include "aten/gpu_tiles.h"
#include "aten/grads.h"
#include "aten/slice.h"
#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

void add_bias_grad(const Tensor& dbias, const Tensor& ds, Block rows, Block keys) {
  const Tensor part = ScoreTerms::bias_tile(dbias, rows, keys);
  std::vector<int64_t> broadcast;
  for (int64_t dim = 0; dim < 4; ++dim) {
    if (part.size(dim) == 1 && ds.size(dim) > 1) broadcast.push_back(dim);
  }
  part.add_(broadcast.empty() ? ds : ds.sum(broadcast, /*keepdim=*/true));
}

namespace {

// What backward needs of a block of query rows, in tiles.
struct RowBlock {
  Block rows;
  Tensor q;  // scaled
  Tensor dout, lse, delta;
  Tensor dq;  // grows with each block of keys
};

std::vector<RowBlock> load_row_blocks(const Slice& slice, const SavedRows& saved) {
  const auto& [dout, out, lse, dlse] = saved;
  std::vector<RowBlock> blocks;
  for (int64_t i = 0; i < slice.count_row_blocks(); ++i) {
    RowBlock r;
    r.rows = slice.row_block(i);
    r.q = slice.scaled_queries(r.rows);
    r.dout = slice.tile(dout, r.rows);
    r.lse = slice.lse_column(lse, r.rows);
    r.delta = (r.dout * slice.tile(out, r.rows)).sum(-1, /*keepdim=*/true);  // δ = rowsum(dO ∘ O)
    if (dlse.defined()) r.delta.sub_(slice.tile(dlse, r.rows));              //     − dLSE
    r.dq = at::zeros(r.q.sizes(), r.q.options());
    blocks.push_back(std::move(r));
  }
  return blocks;
}

// One tile: rows of r against keys k, v; adds to r.dq, dk, dv, dbias.
void backward_tile(const Slice& slice, const GradMask& need, RowBlock& r, Block keys,
                   const Tensor& k, const Tensor& v, Tensor dk, Tensor dv, const Tensor& dbias) {
  const ScoreTerms& terms = slice.terms;
  const ScoreTile tile = terms.scores(r.q, k, r.rows, keys, {r.q, k, v, r.dout, r.delta});
  const Tensor p = tile.probabilities(r.lse);  // P = exp(S − LSE)
  const Tensor dropout = slice.dropout_factors(r.rows, keys);
  if (need.v) {
    const Tensor kept = dropout.defined() ? p * dropout : p;
    tile.add_transposed_product(dv, kept, r.dout);  // dV += dropout(P)ᵀ dO
  }
  if (!need.q && !need.k && !need.bias) return;

  Tensor ds = product(r.dout, v.transpose(-2, -1));  // dP = dO Vᵀ
  if (dropout.defined()) ds.mul_(dropout);           // dP = dropout(dP)
  ds.sub_(r.delta).mul_(p);                          // dS = P ∘ (dP − δ)
  tile.remask(ds, 0);
  if (need.bias) add_bias_grad(dbias, slice.unpack_queries(ds), r.rows, keys);
  if (tile.tanh.defined()) {
    ds.addcmul_(ds * tile.tanh, tile.tanh, -1);  // dS ∘= 1 − tanh²(S / softcap)
  }
  if (need.q) tile.add_product(r.dq, ds, k);             // dQ += dS K
  if (need.k) tile.add_transposed_product(dk, ds, r.q);  // dK += dSᵀ Q
}

void backward_slice(const Slice& slice, const GradMask& need, const SavedRows& saved,
                    const SliceGrads& grads) {
  std::vector<RowBlock> row_blocks = load_row_blocks(slice, saved);
  const ScoreTerms& terms = slice.terms;
  for (int64_t j = 0; j < slice.count_key_blocks(); ++j) {
    const Block block = slice.key_block(j);
    const Tensor k = slice.tile(slice.k, block), v = slice.tile(slice.v, block);
    // Contiguous, which k and v may not be: a product of several matrices is one call only then.
    const Tensor dk = at::zeros(k.sizes(), k.options()), dv = at::zeros(v.sizes(), v.options());
    for (RowBlock& r : row_blocks) {
      Block left = terms.visible_keys(r.rows, block);
      while (left.size() > 0) {
        const Block keys = slice.first_keys(r.rows, left);
        const auto part = [&](const Tensor& x) {
          return narrowed(x, -2, {keys.first - block.first, keys.last - block.first});
        };
        backward_tile(slice, need, r, keys, part(k), part(v), part(dk), part(dv), grads.dbias);
        left.first = keys.last;
      }
    }
    const auto place = [&](const Tensor& x) { return narrowed(x, 2, block); };
    // The scaled q of the tiles has brought query_scale into dK already.
    const double rest = terms.softmax_scale / terms.query_scale();
    if (need.k) place(grads.dk).copy_(slice.unpack_keys(dk) * rest);
    if (need.v) place(grads.dv).copy_(slice.unpack_keys(dv));
  }
  for (const RowBlock& r : row_blocks) {
    if (need.q) {
      narrowed(grads.dq, 2, r.rows).copy_(slice.unpack_queries(r.dq) * terms.softmax_scale);
    }
    if (need.sink) {
      const Tensor logits = slice.sink_column(r.rows) * kLog2E;
      limit_sinks(logits);
      const Tensor p_sink = (logits - r.lse).exp2_();
      grads.dsink.sub_(slice.unpack_queries(p_sink * r.delta).sum({2, 3}));
    }
  }
}

// x (total, heads, d) with NaN in these tokens, bool (total).
void mark_lost(const Tensor& x, const Tensor& tokens) {
  x.masked_fill_(tokens.unsqueeze(-1).unsqueeze(-1), std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

Grads bwd(const Args& args, const Tensor& dout, const std::optional<Tensor>& dlse,
          const Tensor& out, const Tensor& lse, std::array<bool, 5> grad_mask,
          const std::array<Tensor, 3>& into) {
  const Call call(args);
  const auto [q, k, v, bias, sink] = grad_mask;
  const GradMask need = {q, k, v, bias && args.attn_bias, sink && args.learnable_sink};

  // What no sequence covers stays zero.
  const bool all_written =
      call.on_gpu && !call.queries.padded() && !call.keys.padded() && call.count_slices() > 0;
  const auto options = args.q.options(), compute = options.dtype(compute_dtype(args.q));
  const auto zeros_like = [&](bool needed, const Tensor& x, const at::TensorOptions& as) {
    return needed ? at::zeros(x.sizes(), as) : at::empty({0}, as);
  };
  const auto gradient_like = [&](bool needed, const Tensor& x) {
    return needed && all_written ? at::empty(x.sizes(), options) : zeros_like(needed, x, options);
  };
  Grads grads;
  const auto& [into_q, into_k, into_v] = into;
  grads.dq = into_q.defined() ? into_q : gradient_like(need.q, args.q);
  grads.dk = into_k.defined() ? into_k : gradient_like(need.k, args.k);
  grads.dv = into_v.defined() ? into_v : gradient_like(need.v, args.v);
  grads.dbias = need.bias ? zeros_like(true, *args.attn_bias, compute) : at::empty({0}, options);
  const Tensor dsink = at::zeros({call.queries.batch(), args.q.size(-2)}, compute);

  std::optional<Result> dq, dk, dv;
  if (need.q) dq.emplace(call.queries, grads.dq);
  if (need.k) dk.emplace(call.keys, grads.dk);
  if (need.v) dv.emplace(call.keys, grads.dv);
  call.for_slices(!need.bias || call.owns_bias(), [&](const Slice& slice) {
    const auto queries = [&](const Tensor& x) {
      return narrowed(call.queries.load(x, slice.batches), 1, slice.heads);
    };
    const SavedRows saved = {queries(dout), queries(out), queries(lse_tokens(lse)),
                             dlse ? queries(lse_tokens(*dlse)) : Tensor()};
    SliceGrads parts;
    if (dq) parts.dq = dq->part(slice.batches, slice.heads);
    if (dk) parts.dk = dk->part(slice.batches, slice.kv_heads);
    if (dv) parts.dv = dv->part(slice.batches, slice.kv_heads);
    if (need.bias) parts.dbias = broadcast_part(grads.dbias, slice);
    parts.dsink = dsink.narrow(0, slice.batches.first, slice.batches.size())
                      .narrow(1, slice.heads.first, slice.heads.size());
    slice.on_gpu ? bwd_on_gpu(slice, need, saved, parts)
                 : backward_slice(slice, need, saved, parts);
  });
  if (dq) dq->finish();
  if (dk) dk->finish();
  if (dv) dv->finish();
  // As in forward: what a max_seqlen below the true length has lost is NaN, never 0.
  if (args.cu_seqlens_q && call.queries.padded() && call.count_slices() > 0) {
    const Tensor queries_lost = call.queries.lost_tokens(call.keys.too_long());
    const Tensor keys_lost = call.keys.lost_tokens(call.queries.too_long());
    if (dq) mark_lost(grads.dq, queries_lost);
    if (dk) mark_lost(grads.dk, keys_lost);
    if (dv) mark_lost(grads.dv, keys_lost);
  }
  if (need.bias) grads.dbias = grads.dbias.to(args.attn_bias->scalar_type());
  grads.dsink =
      need.sink ? dsink.sum(0).to(args.learnable_sink->scalar_type()) : at::empty({0}, options);
  return grads;
}

}  // namespace flash_attn::aten
