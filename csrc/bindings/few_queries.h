// A forward of few queries beside many keys, as in generation, on decode's kernels: they cut the keys
// into pieces, and query heads that share a kv head are rows of one product.
#pragma once

#include "to_params.h"

namespace flash_attn {

struct FewQueriesCall {
  DecodeArgs args;  // q of a varlen call has its shape alone: nothing is allocated for it yet
  CallShape shape;
  Plan plan;
  bool serves_all;  // else only those sequences of a varlen call for whose queries q has room
};

// The call as one of decode, of checked arguments; none: it is not of that kind.
std::optional<FewQueriesCall> few_queries_call(const FwdArgs& args);

// The call as one of the forward's kernels, which may cut the keys of a varlen one with few tiles.
// decode_takes_few: few_queries_call() is not none.
CallShape forward_shape(const FwdArgs& args, bool decode_takes_few);

// The results of a call that decode serves.
FwdResult fwd_of_few_queries(FewQueriesCall call, const FwdArgs& args);

// Decode's part of a varlen call, launched. Batches of a serving engine have sequences of one query
// beside others of hundreds: decode takes the short ones, and the forward's kernels the rest.
class VarlenDecode {
 public:
  // params: of the call's readable() arguments. Where decode does not serve all, they become those
  // of a forward of the long sequences.
  VarlenDecode(FewQueriesCall call, FwdParams& params, const at::Tensor& like);

  // How many long sequences there are, on the device, for the forward in pieces. It visits no tiles
  // of others, of which any other form visits one for each sequence and head.
  const int32_t* long_sequences() const { return long_sequences_; }
  // Whether that gains more than to merge the rows of one piece costs. A merged row takes about a
  // sixteenth of the time of a visit.
  bool gains_by_pieces() const { return 16 * int64_t{whole_.batch} > whole_.total_q; }

  // Writes the results to their places in out and lse of these params, over what the forward has
  // written to them.
  void scatter(const FwdParams& results, Stream stream) const;

 private:
  bool serves_all_;
  int tokens_;
  FwdParams whole_;              // of the whole call
  at::Tensor ends_, long_ones_;  // of each sequence
  const int32_t* long_sequences_ = nullptr;
  DecodeResult results_;
};

}  // namespace flash_attn
