#include "key_mask.h"

#include <ATen/ops/empty.h>

#include "../cuda/key_mask.h"

namespace flash_attn {

DealtSequences::DealtSequences(AttnParams& params, ScoreParams& score, const at::Tensor& like)
    : mask_(score.bias),
      seqused_k_(params.seqused_k),
      numbers_(at::empty({2 * int64_t{params.batch}}, like.options().dtype(at::kInt))) {
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

}  // namespace flash_attn
