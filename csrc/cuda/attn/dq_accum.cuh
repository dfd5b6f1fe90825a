// The layout of BwdParams::dq_accum, (heads_q, rows, head-dim class) fp32, that blocks of keys add
// to.
#pragma once

namespace flash_attn {

// A row is plain, but for the order inside each 16 columns: what one lane of an accumulator holds
// of them (tile/fragment.cuh) lies together where the four values are one vector reduction (sm_90
// and newer); else the quad's first values lie together, then its second, …, so that a reduction of
// one value a lane touches few 32-byte sectors.
//
//   i-th value (0-3) of lane t of the quad is column 8·(i / 2) + 2·t + i % 2 and lies at
__device__ __forceinline__ constexpr int dq_accum_position(int t, int i) {
#if __CUDA_ARCH__ >= 900
  return 4 * t + i;
#else
  return 4 * i + t;
#endif
}

}  // namespace flash_attn
