#include "key_mask.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "../cuda/key_mask.h"

namespace flash_attn {

namespace {

at::Tensor numbers_for(const AttnParams& params, const at::Tensor& like) {
  return at::empty({2 * int64_t{params.batch} + 1}, like.options().dtype(at::kInt));
}

}  // namespace

DealtSequences::DealtSequences(FwdParams& params, const at::Tensor& like)
    : seqused_k_(params.seqused_k), numbers_(numbers_for(params, like)) {
  auto* const hidden = numbers_.data_ptr<int32_t>();
  int32_t* const seqused = hidden + params.batch;
  params.tile_counter = seqused + params.batch;
  cuda::run_find_missing_pages(params, hidden, seqused, params.tile_counter, stream_of(like));
  params.seqused_k = seqused;
  params.seqlen_new = 0;
}

DealtSequences::DealtSequences(AttnParams& params, ScoreParams& score, const at::Tensor& like)
    : mask_(score.bias), seqused_k_(params.seqused_k), numbers_(numbers_for(params, like)) {
  auto* const hidden = numbers_.data_ptr<int32_t>();
  int32_t* const seqused = hidden + params.batch;
  cuda::run_find_hidden(params, mask_, hidden, seqused, stream_of(like));
  params.seqused_k = seqused;
  score.bias = {};
}

std::optional<DealtSequences> deal_out(AttnParams& params, ScoreParams& score,
                                       const AttnArgs& args) {
  if (!deals_out_sequences(args)) return std::nullopt;
  return DealtSequences(params, score, args.q);
}

void clear_pages(const at::Tensor& k, const at::Tensor& v, const at::Tensor& missing) {
  const c10::DeviceGuard guard(k.device());
  const int64_t pages = missing.numel();
  const auto page_bytes = [&](const at::Tensor& x) {
    return pages == 0 ? 0 : static_cast<int64_t>(x.nbytes()) / pages;
  };
  cuda::run_clear_pages(k.data_ptr(), page_bytes(k), v.data_ptr(), page_bytes(v),
                        missing.const_data_ptr<bool>(), pages, stream_of(k));
}

}  // namespace flash_attn
