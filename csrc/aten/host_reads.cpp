// A file of its own, so that a test can link another answer and run the device's way on a CPU.
#include "aten/gpu.h"
#include "aten/parallel.h"

namespace flash_attn::aten {

bool host_reads(const at::Tensor& x) { return x.is_cpu() && gpu_of(x) == nullptr; }

}  // namespace flash_attn::aten
