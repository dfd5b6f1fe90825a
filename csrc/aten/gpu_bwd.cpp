// bwd.cpp's loop on a GPU: what it has in several operations of ATen is one kernel here.
//
//   δ = rowsum(dO ∘ O) − dLSE                         run_row_delta
//   for each block of keys j
//     for each block of rows i that sees keys j
//       S = Q_i K_jᵀ,  dP = dO_i V_jᵀ                 products, and run_retake
//       P, dS = …                                     run_gradient_step
//       dV_j += Pᵀ dO_i,  dQ_i += dS K_j,  dK_j += dSᵀ Q_i        products, and run_restore
#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <vector>

#include "aten/gpu.h"
#include "aten/gpu_tiles.h"
#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

namespace {

Tensor row_delta(const SavedRows& saved, at::TensorOptions wide) {
  const Tensor& dout = saved.dout;
  const Tensor delta = at::empty({dout.size(0), dout.size(1), dout.size(2), 1}, wide);
  if (delta.numel() == 0) return delta;
  cuda::run_row_delta(rows_of(dout), part_of(saved.out),
                      saved.dlse.defined() ? part_of(saved.dlse) : cuda::TensorPart{},
                      dtype_of(delta), delta.data_ptr(), stream_of(dout));
  return delta;
}

struct TileGradients {
  Tensor p, ds;
};
TileGradients gradients_of(const Slice& slice, const cuda::ScoreTile& tile, const Tensor& products,
                           const Tensor& value_products, const Tensor& lse, const Tensor& delta,
                           const Tensor& dbias) {
  const bool in_place = products.scalar_type() == slice.q.scalar_type();
  const auto place = [&](const Tensor& wide) {
    return in_place ? wide : at::empty(wide.sizes(), slice.q.options());
  };
  const TileGradients gradients = {place(products), place(value_products)};
  cuda::run_gradient_step(tile,
                          {.products = products.const_data_ptr(),
                           .value_products = value_products.const_data_ptr(),
                           .lse = part_of(lse),
                           .delta = part_of(delta),
                           .p = gradients.p.data_ptr(),
                           .ds = gradients.ds.data_ptr(),
                           .dbias = dbias.defined() ? dbias.data_ptr() : nullptr},
                          stream_of(products));
  return gradients;
}

// place = x · scale, in place's dtype; 0 where there is no x.
void write_scaled(Tensor place, const std::optional<Tensor>& x, double scale) {
  if (x) {
    at::mul_out(place, *x, at::native::wrapped_scalar_tensor(scale));
  } else {
    place.zero_();
  }
}

Tensor sink_gradient(const Slice& slice, const Tensor& lse, const Tensor& delta) {
  const Block rows = {0, slice.seqlen_q()};
  const Tensor logits = slice.sink_column(rows) * kLog2E;
  limit_sinks(logits);
  const Tensor p_sink = (logits - slice.lse_column(lse, rows)).exp2_();
  return (slice.unpack_queries(p_sink) * delta).sum({2, 3});
}

}  // namespace

void bwd_on_gpu(const Slice& slice, const GradMask& need, const SavedRows& saved,
                const SliceGrads& grads) {
  const int64_t kv_heads = slice.kv_heads.size(), matrices = slice.batches.size() * kv_heads;
  const auto wide = slice.q.options().dtype(compute_dtype(slice.q));
  const bool hides = slice.may_hide({0, slice.seqlen_k()});
  const Tensor delta = row_delta(saved, wide);
  // One copy of each serves both of its products: what a score lacks of it, run_retake() tells. No
  // sum over rows or keys has v in it, and so v may hold anything.
  const SeenOperand q(slice.q, kv_heads, hides), k(slice.k, kv_heads, hides),
      dout(saved.dout, kv_heads, hides), v(slice.v, kv_heads, /*hides=*/false);
  std::vector<Tensor> dq(slice.count_row_blocks());

  for (int64_t j = 0; j < slice.count_key_blocks(); ++j) {
    const Block block = slice.key_block(j);
    const Tensor k_j = k.matrices(block), v_j = v.matrices(block);
    Tensor dk, dv;
    // The last rows first: with a causal mask they see all keys of the block, and so begin its sums.
    for (int64_t i = slice.count_row_blocks() - 1; i >= 0; --i) {
      const Block rows = slice.row_block(i), keys = slice.visible_keys(rows, block);
      if (keys.size() == 0) continue;
      const auto of_keys = [&](const Tensor& x) {
        return x.narrow(1, keys.first - block.first, keys.size());
      };
      const cuda::ScoreTile tile = score_tile(slice, rows, keys);
      const Tensor q_i = q.matrices(rows), dout_i = dout.matrices(rows);
      const Tensor products = wide_product(q_i, of_keys(k_j).transpose(1, 2));
      const Tensor value_products = wide_product(dout_i, of_keys(v_j).transpose(1, 2));
      if (hides) {
        cuda::run_retake(tile,
                         {.scores = {products.data_ptr(), q.rows(), k.rows()},
                          .values = {value_products.data_ptr(), dout.rows(), v.rows()}},
                         stream_of(products));
      }
      const Tensor dbias = need.bias ? at::empty(products.sizes(), wide) : Tensor();
      const auto [p, ds] =
          gradients_of(slice, tile, products, value_products, saved.lse, delta, dbias);
      const auto add_to_keys = [&](Tensor& sum, const SeenOperand& operand, const Tensor& a,
                                   const Tensor& b) {
        if (!sum.defined() && keys.size() < block.size()) {
          sum = at::zeros({matrices, block.size(), b.size(2)}, wide);
        }
        Tensor part = sum.defined() ? of_keys(sum) : sum;
        operand.add_product(part, tile, a, b, p, /*of_keys=*/true);
        if (!sum.defined()) sum = part;
      };
      if (need.v) add_to_keys(dv, dout, p, dout_i);
      if (need.q) k.add_product(dq[i], tile, ds, of_keys(k_j), p, /*of_keys=*/false);
      if (need.k) add_to_keys(dk, q, ds, q_i);
      if (need.bias) add_bias_grad(grads.dbias, slice.unpack_queries(dbias), rows, keys);
    }
    const auto place = [&](const Tensor& x) { return x.narrow(2, block.first, block.size()); };
    const auto unpacked = [&](const Tensor& sum) {
      return sum.defined() ? std::optional(slice.unpack_keys(sum)) : std::nullopt;
    };
    if (need.k) write_scaled(place(grads.dk), unpacked(dk), slice.terms.softmax_scale);
    if (need.v) write_scaled(place(grads.dv), unpacked(dv), 1);
  }
  for (int64_t i = 0; need.q && i < slice.count_row_blocks(); ++i) {
    const Block rows = slice.row_block(i);
    const std::optional<Tensor> sum =
        dq[i].defined() ? std::optional(slice.unpack_queries(dq[i])) : std::nullopt;
    write_scaled(grads.dq.narrow(2, rows.first, rows.size()), sum, slice.terms.softmax_scale);
  }
  if (need.sink) grads.dsink.sub_(sink_gradient(slice, saved.lse, delta));
}

}  // namespace flash_attn::aten
