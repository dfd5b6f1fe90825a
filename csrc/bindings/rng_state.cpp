#include <ATen/ops/randint.h>

#include <limits>

#include "args.h"

namespace flash_attn {

// Two draws from torch's generator of the device: reproducible by manual_seed, and advanced by a
// replayed CUDA graph.
at::Tensor rng_state(const at::Tensor& like) {
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, like.options().dtype(at::kLong));
}

}  // namespace flash_attn
