// What a score can be, the same in every dtype and on every backend. S is a score of a call with
// terms: softcap, bias, slopes of ALiBi, dropout.
//
//   S < −2^26           The key is hidden, as by a bias of −∞. Masks of finfo.min in fp32 and bf16
//                       mean this, and so do masks of −1e9; fp16's −65504 is a number.
//   a row of nothing else                  is empty: O = 0, LSE = −∞, gradients 0.
//   a bias > 2^26       counts as 2^26, a slope > 1024 as 1024 and a slope < −64 as −64.
//   a sink > 2.358e38   counts as that and one < −2.358e38 as −∞, with or without terms.
//   |LSE| > 2^22 (fp64 inputs: 2^51)       The row has its O and its LSE but gives no gradient: there
//                       LSE is too coarse to hold a fraction, and P = exp(S − LSE) could be anything.
//
// So no number that a term may have makes a NaN, forward or backward. The border is where kernels
// can still tell a row's maximum from itself: they compute S · log2 e − m in one rounding, and
// beyond it m has lost up to half of its last place. At 1e9 P would be off by a factor of 2^64,
// which fp16 cannot hold. The border costs kernels nothing, as the running maximum starts there. A
// slope of 1024 leaves nothing of a diagonal key's neighbours; kernels sum it up from a tile's
// corner, and still end at 0 on the diagonal. One of −64 stays below the border for 2^20 keys.
#pragma once

#include <cstdint>

namespace flash_attn {

inline constexpr double kMaxScore = 1 << 26;
inline constexpr double kMaxSlope = 1024, kMinSlope = -64;
inline constexpr double kMaxLse = 1 << 22;
inline constexpr double kMaxLseFp64 = int64_t{1} << 51;
inline constexpr double kMaxSink = 2.358e38;  // times log2 e still a number of fp32

// Beyond 1e30 nothing is capped, and below 1e-20 every score is as good as 0: there quotients and
// products would leave the range of fp32.
inline constexpr double kMinSoftcap = 1e-20, kMaxSoftcap = 1e30;

}  // namespace flash_attn
