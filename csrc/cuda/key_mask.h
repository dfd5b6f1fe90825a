// A mask that hides keys of whole sequences, as missing pages make it.
#pragma once

#include "../core/params.h"
#include "device.h"

namespace flash_attn::cuda {

// mask: bool, of the keys alone. hidden (batch) gets 1 for a sequence of which the mask hides keys.
// seqused (batch) gets 0 for such a sequence, and for the others the keys that count.
void run_find_hidden(const AttnParams& params, const BiasParams& mask, int32_t* hidden,
                     int32_t* seqused, Stream stream);

// hidden (batch) gets 1 for a sequence that lacks a page of keys which any of its queries sees.
// seqused (batch) gets 0 for such a sequence, and for the others the keys that count, appended ones
// too. tile_counter gets 0. A kernel that waits for its prerequisites may begin beside this one.
void run_find_missing_pages(const FwdParams& params, int32_t* hidden, int32_t* seqused,
                            int32_t* tile_counter, Stream stream);

// Zeros in the pages of k and v whose entry is not 0: so many bytes each, contiguous.
void run_clear_pages(void* k, int64_t k_page_bytes, void* v, int64_t v_page_bytes,
                     const bool* missing, int64_t pages, Stream stream);

}  // namespace flash_attn::cuda
