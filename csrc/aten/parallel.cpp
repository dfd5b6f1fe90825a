#include "aten/parallel.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>

namespace flash_attn::aten {

void run_tasks(int64_t count, bool independent, const std::function<void(int64_t)>& task,
               bool one_core_each) {
  const int64_t threads = at::get_num_threads();
  const bool too_few = count < threads && !one_core_each;
  if (!independent || threads == 1 || too_few || at::in_parallel_region()) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  // parallel_for would cut the tasks into runs of equal length, but causal tasks differ in work:
  // each worker draws from one counter instead.
  const at::ThreadLocalState caller;
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    // Workers start with the thread-local state of a fresh thread: autograd on, no inference mode.
    const at::ThreadLocalStateGuard as_caller(caller);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t i = next++; i < count; i = next++) task(i);
  });
}

}  // namespace flash_attn::aten
