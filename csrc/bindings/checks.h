// Every input check of the ops. A message says the argument, what was expected and what came.
#pragma once

#include "args.h"

namespace flash_attn {

// Shapes, dtypes, devices and scalar ranges; symbolic sizes are compared, not read, so the meta
// kernels run it too.
void check(const FwdArgs& args);
void check(const BwdArgs& args);
// On the CPU, where the host may look: no sequence is longer than max_seqlen. Reads the lengths.
void check_max_seqlens(const AttnArgs& args);
void check(const DecodeArgs& args);
void check(const KvcacheArgs& args);

// Whether a cache holds numbers that a scale multiplies: float8_e4m3fn or int8.
bool is_quantized(const at::Tensor& cache);

// head_dim^-0.5 unless the caller chose.
double resolved_scale(std::optional<double> softmax_scale, int64_t head_dim);

// A plain number; only under a meta kernel can it be symbolic.
inline int64_t value(const c10::SymInt& number) { return number.guard_int(__FILE__, __LINE__); }

}  // namespace flash_attn
