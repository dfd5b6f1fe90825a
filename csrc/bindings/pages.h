// Keys that lie in pages, in a varlen forward that reads them where they lie.
#pragma once

#include "to_params.h"

namespace flash_attn {

// params.pages and what depends on them, of readable() arguments.
void fill_pages(FwdParams& params, const AttnArgs& args);

}  // namespace flash_attn
