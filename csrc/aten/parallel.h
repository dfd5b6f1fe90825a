// Where work runs: on the CPU a tile is one core's work, elsewhere one operation covers a tile of
// every batch and head.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace flash_attn::aten {

// Whether the host may read x's data (lengths, say) without waiting for a device.
bool host_reads(const at::Tensor& x);

// task(0), …, task(count - 1), in any order. With enough tasks each core takes the next one that is
// left and the operations inside run on that core alone, so that a tile stays in its cache; with
// fewer, or where tasks write to the same places, they run one after the other and their operations
// use all cores. On a device they do too: workers would launch on streams of their own, and all
// tiles would live at once. one_core_each: one core a task even with fewer, so that the bits of one
// do not depend on how many there are.
void run_tasks(int64_t count, bool independent, const std::function<void(int64_t)>& task,
               bool one_core_each = false);

}  // namespace flash_attn::aten
