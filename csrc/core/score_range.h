// What a score can be, the same in every dtype and on every backend. S is a score with all its terms
// (softcap, bias, ALiBi), or a sink's.
//
//   S < −2.358e38      The key is hidden, as by a bias of −∞: S · log2 e overflows fp32, in which
//                      kernels keep scores. Masks of finfo.min in fp32 and bf16 mean this; fp16's
//                      −65504 is a number. fp64 computes with the same border.
//   a row of nothing else                  is empty: O = 0, LSE = −∞, gradients 0.
//   S > 2.358e38       counts as 2.358e38. A slope of ALiBi beyond ±1e38 counts as that.
//   |LSE| > 2^22 (fp64 inputs: 2^51)       The row has its O and its LSE but gives no gradient: there
//                      LSE is too coarse to hold a fraction, and P = exp(S − LSE) could be anything.
//
// So no number that a term may have makes a NaN, forward or backward.
#pragma once

#include <cstdint>
#include <limits>

namespace flash_attn {

// The border in units of log 2, S · log2 e.
inline constexpr double kMaxScoreLog2 = std::numeric_limits<float>::max();
inline constexpr double kMaxSlope = 1e38;
inline constexpr double kMaxLse = 1 << 22;
inline constexpr double kMaxLseFp64 = int64_t{1} << 51;

// Beyond 1e30 nothing is capped, and below 1e-20 every score is as good as 0: there quotients and
// products would leave the range of fp32.
inline constexpr double kMinSoftcap = 1e-20, kMaxSoftcap = 1e30;

}  // namespace flash_attn
