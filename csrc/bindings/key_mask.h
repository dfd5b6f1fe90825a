// A varlen call with a mask of the keys alone, bool and the same for all heads and queries, as
// pages that do not exist make it, or with the pages themselves. Few sequences lack a page, or none
// does; which, only the device knows. So the call runs twice: first for the sequences of which
// nothing is hidden, as if there were no mask, and then on sm80's kernels with score terms, for the
// others. Each run leaves the other's rows as they are.
#pragma once

#include <optional>

#include "../core/sequences.h"
#include "to_params.h"

namespace flash_attn {

// The sequences of a call of readable() arguments, dealt out: none, if the call is not of that
// kind.
class DealtSequences {
 public:
  // `params` and `score` become those of the first run. like: a tensor of the call's device.
  DealtSequences(AttnParams& params, ScoreParams& score, const at::Tensor& like);
  // The same by params.pages, of a forward, which gets its tile_counter here.
  DealtSequences(FwdParams& params, const at::Tensor& like);

  // Of each sequence 1 if it is of the second run, on the device.
  const int32_t* hidden() const { return numbers_.const_data_ptr<int32_t>(); }

  // Those of the second. Params: FwdParams or BwdParams, of the first.
  template <typename Params>
  OfSequences<Params> rest(Params params) const {
    params.seqused_k = seqused_k_;
    params.score.bias = mask_;
    return {params, hidden()};
  }

 private:
  BiasParams mask_;
  const int32_t* seqused_k_;
  // Of each sequence: whether it is of the rest; then seqused_k of the first run; a tile_counter.
  at::Tensor numbers_;
};

std::optional<DealtSequences> deal_out(AttnParams& params, ScoreParams& score,
                                       const AttnArgs& args);

}  // namespace flash_attn
