// A mask as the ops take it, of dense tensors:
//
//   mask_tiles   uint8 (batch, heads_q, ⌈seqlen_q / 64⌉, ⌈seqlen_k / 64⌉): what is seen of 64 queries by 64
//                keys, as core/tile_mask.h's TileState: 0 nothing, 1 some keys by some queries, 2 all
//   mask_rows    of tiles that are 1. int32 (batch, heads_q, seqlen_q, 4) first, end, first2, end2: a query
//                sees the keys whose labels lie in [first, end) or in [first2, end2). Or uint8 (batch,
//                heads_q, seqlen_q, 8 · ⌈seqlen_k / 64⌉): bit j % 8 of byte j / 8 is whether it sees key j.
//                None: such tiles are hidden
//   mask_labels  int32 (batch, seqlen_k); none: a key's label is its position. Rows with end2 < first2 say
//                that the labels given are positions, too, and need not be read
//
// batch and heads_q may be 1. causal and windows hide keys besides.
#pragma once

#include "../core/tile_mask.h"
#include "args.h"

namespace flash_attn {

// Checks forms and dtypes, with symbolic sizes.
void check_mask(const AttnArgs& args, const c10::SymInt& batch);

// The same call with the mask as a bool attn_bias, which every backend reads.
AttnArgs with_bool_mask(AttnArgs args);

// Which keys an additive bias leaves visible (core/score_range.h), as a bool mask of its shape.
at::Tensor seen_with_bias(const at::Tensor& bias);

// The mask as kernels read it. args are readable() ones.
TileMask tile_mask_params(const AttnArgs& args);

}  // namespace flash_attn
