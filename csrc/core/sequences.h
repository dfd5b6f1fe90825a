// A call whose sequences are dealt out among two launches.
#pragma once

#include <cstdint>

namespace flash_attn {

// The parameters of a kernel that may be asked for some sequences alone: neither reads nor writes
// what belongs to others. Params: FwdParams or BwdParams.
template <typename Params>
struct OfSequences : Params {
  const int32_t* chosen = nullptr;  // (batch), or null: all. 0: left to others

  OfSequences() = default;
  // All of them.
  OfSequences(const Params& params) : Params(params) {}
  OfSequences(const Params& params, const int32_t* chosen) : Params(params), chosen(chosen) {}
};

}  // namespace flash_attn
