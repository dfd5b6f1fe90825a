// Sequences that share their first pages, as calls that know of no sharing.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace flash_attn::aten {

// The pages of each sequence in a row of its own, int32 (batch, columns): those that lie wholly in
// the first lens[b] keys from the row of sequence source[b], the others from its own. rows: the row
// of `table` that a sequence has; none: its own number. What names no row has no pages.
at::Tensor unshared_table(const at::Tensor& table, const std::optional<at::Tensor>& rows,
                          const at::Tensor& source, const at::Tensor& lens, int64_t page_size);

}  // namespace flash_attn::aten
