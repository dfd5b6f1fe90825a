// The two matrix products of kvcache.cuh.
#pragma once

#include <type_traits>

#include "../tile/gemm.cuh"
#include "../tile/warp_grid.cuh"
#include "kvcache_traits.cuh"
#include "widened_gemm.cuh"

namespace flash_attn::cuda {

// The rows of Q as a warp multiplies them: in registers, or where these do not hold them, read
// again with every tile of keys.
template <typename Traits>
class KvcacheQueries {
  using View = SmemOperandA<1, 16, Layout::kKInner, typename Traits::QTile>;

 public:
  __device__ __forceinline__ KvcacheQueries(const typename Traits::QTile& tile, int lane)
      : operand_(make(View(tile, 0, lane))) {}

  // Columns k … k + 15 (fp32: k … k + 7).
  __device__ __forceinline__ void load(uint32_t (&block)[1][4], int k) const {
    operand_.load(block, k);
  }
  __device__ __forceinline__ void walk() { operand_.walk(); }

 private:
  __device__ __forceinline__ static auto make(const View& view) {
    if constexpr (!Traits::kQueriesInRegisters) {
      return view;
    } else {
      OperandA<1, Traits::kHeadDim> Q;
#pragma unroll
      for (int k = 0; k < Traits::kHeadDim; k += 16) {
        uint32_t block[1][4];
        view.load(block, k);
#pragma unroll
        for (int r = 0; r < 4; ++r) Q.data[0][k / 16][r] = block[0][r];
      }
      return Q;
    }
  }

  std::conditional_t<Traits::kQueriesInRegisters, OperandA<1, Traits::kHeadDim>, View> operand_;
};

// Computes S = Q Kᵀ for a warp's quarter of the keys. For 16 keys it takes two sums, which halves
// the chain of dependent products; 32 keys have as many chains in one sum.
template <typename Traits>
  requires(!Traits::kWide)
__device__ __forceinline__ typename Traits::Scores multiply_keys(const KvcacheQueries<Traits>& Q,
                                                                 const typename Traits::KvTile& K,
                                                                 int warp, int lane) {
  using Element = typename Traits::Element;
  using View = SmemOperandB<typename Traits::KvTile, Layout::kKInner>;
  const View view(K, warp * Traits::kWarpKeys, lane);
  constexpr int kSums = Traits::kWarpKeys == 16 ? 2 : 1;
  typename Traits::Scores S[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) S[i].fill(0.f);
#pragma unroll
  for (int unit = 0; unit < Traits::kUnits; unit += 16) {
#pragma unroll
    for (int n = 0; n < Traits::kWarpKeys; n += 16) {
      uint32_t b[4];
      view.load(b, n, unit);
      if constexpr (Traits::k8Bit) {
        multiply_widened_keys<Traits::kCacheDType>(S[0], S[kSums - 1], Q, b, n, unit * 2);
      } else {
        uint32_t q[1][4];
        Q.load(q, unit);
        multiply_block<Element, Into::kSum>(S[unit / 16 % kSums], q, b, n);
      }
    }
  }
  if constexpr (kSums > 1) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < S[0].kRowElements; ++i) S[0].at(half, i) += S[1].at(half, i);
    }
  }
  return S[0];
}

// Does the same in fp32, in as many sums as gemm() has.
template <typename Traits>
  requires Traits::kWide
__device__ __forceinline__ typename Traits::Scores multiply_keys(const KvcacheQueries<Traits>& Q,
                                                                 const typename Traits::KvTile& K,
                                                                 int warp, int lane) {
  using KvTile = typename Traits::KvTile;
  using View = std::conditional_t<Traits::kWarpKeys == 8, EightColumns<KvTile>,
                                  SmemOperandB<KvTile, Layout::kKInner>>;
  typename Traits::Scores S;
  gemm_smem<typename Traits::Element, Traits::kHeadDim, Into::kZero>(
      S, Q, View(K, warp * Traits::kWarpKeys, lane));
  return S;
}

// Computes O += P V for a warp's quarter of the columns. Rows of V that do not exist are 0, as
// their P is.
template <typename Traits>
  requires(!Traits::kWide)
__device__ __forceinline__ void multiply_values(typename Traits::Output& O,
                                                const typename Traits::PTile& P,
                                                const typename Traits::KvTile& V, int warp,
                                                int lane) {
  using Element = typename Traits::Element;
  using KvTile = typename Traits::KvTile;
  const SmemOperand<Side::kA, Layout::kKInner, typename Traits::PTile> p_view(P, 0, lane);
  if constexpr (Traits::k8Bit) {
    const uint32_t address = V.address(lane, warp * 8);
#pragma unroll
    for (int key = 0; key < Traits::kKeys; key += 32) {
      uint32_t p[2][4];
      p_view.load(p[0], 0, key);
      p_view.load(p[1], 0, key + 16);
#pragma unroll
      for (int block = 0; block < Traits::kColumnBlocks; ++block) {
        uint32_t b[4];  // eight keys each, two columns a word
        ptx::ldmatrix_x4_trans(b, KvTile::advance(address, key, block * 8 * kKvcacheWarps));
        multiply_widened_values<Traits::kCacheDType>(O, p[0], p[1], b, block * 16);
      }
    }
  } else {
    const SmemOperandB<KvTile, Layout::kKOuter> v_view(V, warp * 16, lane);
#pragma unroll
    for (int key = 0; key < Traits::kKeys; key += 16) {
      uint32_t p[1][4];
      p_view.load(p[0], 0, key);
#pragma unroll
      for (int block = 0; block < Traits::kColumnBlocks; ++block) {
        uint32_t b[4];
        v_view.load(b, block * 16 * kKvcacheWarps, key);
        multiply_block<Element, Into::kSum>(O, p, b, block * 16);
      }
    }
  }
}

template <typename Traits>
  requires Traits::kWide
__device__ __forceinline__ void multiply_values(typename Traits::Output& O,
                                                const typename Traits::PTile& P,
                                                const typename Traits::KvTile& V, int warp,
                                                int lane) {
  gemm_smem<typename Traits::Element, Traits::kKeys, Into::kSum>(
      O, SmemOperandA<1, 16, Layout::kKInner, typename Traits::PTile>(P, 0, lane),
      DealtColumns<kKvcacheWarps, typename Traits::KvTile>(V, warp, lane));
}

}  // namespace flash_attn::cuda
