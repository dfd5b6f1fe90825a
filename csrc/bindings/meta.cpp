// Shapes, dtypes and strides of the results, for tracing and export. Sizes stay symbolic (sym_size,
// empty_symint): a kernel that reads size() is compiled again for every length.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"

namespace flash_attn {
namespace {

using at::Tensor;
using c10::SymInt;

Tensor empty(std::vector<SymInt> sizes, const Tensor& like, at::ScalarType dtype) {
  return at::empty_symint(sizes, like.options().dtype(dtype));
}

Tensor same_form(const Tensor& tensor) {
  return empty(tensor.sym_sizes().vec(), tensor, tensor.scalar_type());
}

at::ScalarType lse_dtype(const Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor max_logits_of(const Tensor& q, bool wanted) {
  return empty({wanted ? q.sym_size(-2) : SymInt(0)}, q, lse_dtype(q));
}

FwdResult fwd_meta(const FwdArgs& args) {
  const AttnArgs& attn = args.attn;
  check(args);
  const Tensor& q = attn.q;
  auto out_sizes = q.sym_sizes().vec();
  out_sizes.back() = attn.v.sym_size(-1);
  const auto lse_sizes = attn.is_varlen()
                             ? std::vector<SymInt>{q.sym_size(1), q.sym_size(0)}
                             : std::vector<SymInt>{q.sym_size(0), q.sym_size(2), q.sym_size(1)};
  std::vector<SymInt> probs_sizes = {0};
  if (args.return_probs) {
    const SymInt batch = attn.is_varlen() ? attn.cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0);
    probs_sizes = {batch, q.sym_size(-2), attn.is_varlen() ? attn.max_seqlen_q : q.sym_size(1),
                   attn.is_varlen() ? attn.max_seqlen_k : attn.k.sym_size(1)};
  }
  return {empty(out_sizes, q, q.scalar_type()), empty(lse_sizes, q, lse_dtype(q)),
          empty(probs_sizes, q, q.scalar_type()), max_logits_of(q, args.return_max_logits)};
}

BwdResult bwd_meta(const BwdArgs& args) {
  check(args);
  const auto wanted = [&](int which, const OptTensor& input) {
    return args.grad_mask[which] && input ? same_form(*input)
                                          : empty({0}, args.attn.q, args.attn.q.scalar_type());
  };
  const auto perhaps_wide = [&](int which, const Tensor& input, bool wide) {
    const Tensor gradient = wanted(which, input);
    return wide ? gradient.to(lse_dtype(input)) : gradient;
  };
  return {perhaps_wide(0, args.attn.q, args.wide_query_gradient),
          perhaps_wide(1, args.attn.k, args.wide_key_gradients),
          perhaps_wide(2, args.attn.v, args.wide_key_gradients), wanted(3, args.attn.attn_bias),
          wanted(4, args.attn.learnable_sink)};
}

DecodeResult decode_results(const DecodeArgs& args) {
  const Tensor& q = args.q;
  auto out_sizes = q.sym_sizes().vec();
  out_sizes.back() = args.v_cache.sym_size(-1);
  return {empty(out_sizes, q, q.scalar_type()),
          empty({q.sym_size(0), q.sym_size(2), q.sym_size(1)}, q, lse_dtype(q)),
          max_logits_of(q, args.return_max_logits)};
}

DecodeResult decode_meta(const DecodeArgs& args) {
  check(args);
  return decode_results(args);
}

DecodeResult kvcache_meta(const KvcacheArgs& args) {
  check(args);
  return decode_results(args.decode);
}

Tensor rng_state_meta(const Tensor& like) { return empty({2}, like, at::kLong); }

}  // namespace
}  // namespace flash_attn

TORCH_LIBRARY_IMPL(flash_attn, Meta, library) {
  using namespace flash_attn;
  library.impl("fwd", TORCH_FN(&Fwd::from_list<&fwd_meta>));
  library.impl("bwd", TORCH_FN(&Bwd::from_list<&bwd_meta>));
  library.impl("decode", TORCH_FN(&Decode::from_list<&decode_meta>));
  library.impl("kvcache", TORCH_FN(&Kvcache::from_list<&kvcache_meta>));
  library.impl("rng_state", TORCH_FN(&rng_state_meta));
}
