// Keys that lie in pages, in a varlen forward that reads them where they lie.
#pragma once

#include "to_params.h"

namespace flash_attn {

// Whether sm90's boxes can bring the keys that count. They hold whole eights of keys of a page, of
// which some can be hidden in front of the others or behind them, not on both sides. So a window to
// the left is at least eight keys long; counted from the top left, the last key could cut it short.
bool fits_boxes(int64_t page_size, int window_left, bool top_left);

// params.pages and what depends on them, of readable() arguments.
void fill_pages(FwdParams& params, const AttnArgs& args);

}  // namespace flash_attn
