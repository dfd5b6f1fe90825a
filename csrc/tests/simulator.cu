// Kernels with a fault each, and the same without it: what the simulated GPU makes of them. A C
// interface for tests/test_simulator.py.
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../cuda/launch.h"
#include "../cuda/ptx/barrier.cuh"
#include "../cuda/ptx/cp_async.cuh"
#include "../cuda/ptx/ldmatrix.cuh"
#include "../cuda/ptx/mbarrier.cuh"
#include "../sm90/ptx/warpgroup.cuh"
#include "../sm90/tile/gemm.cuh"

namespace flash_attn::tests {

constexpr int kBlocks = 32;
constexpr int kThreads = 128;
constexpr int kSmemBytes = 16 * 1024;

// Each thread's element of a block's result, which ought to be 1.
__device__ float& own(float* results) { return results[blockIdx.x * kThreads + threadIdx.x]; }

template <bool kWaits>
__global__ void copy_kernel(const float* ones, float* results) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto* const numbers = reinterpret_cast<float*>(dynamic_smem);
  ptx::cp_async_4(ptx::smem_address(&numbers[threadIdx.x]), &ones[threadIdx.x], 4);
  ptx::cp_async_commit();
  if (kWaits) ptx::cp_async_wait<0>();
  own(results) = numbers[threadIdx.x];
}

template <bool kWaits>
__global__ void exchange_kernel(const float* ones, float* results) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto* const numbers = reinterpret_cast<float*>(dynamic_smem);
  numbers[threadIdx.x] = ones[threadIdx.x];
  if (kWaits) __syncthreads();
  own(results) = numbers[(threadIdx.x + 64) % kThreads];
}

template <bool kWaits>
__global__ void product_kernel(const float* ones, float* results) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  using Tile = SmemTile<__half, 64, 64>;
  auto& tile = *reinterpret_cast<Tile*>(dynamic_smem);
  for (int i = threadIdx.x; i < 64 * 64; i += kThreads) {
    tile.data[i] = __float2half_rn(ones[0] / 8);
  }
  __syncthreads();
  Accumulator<1, 64> sums;
  sums.fill(0.f);
  const sm90::WgmmaOperand<Layout::kKInner, Tile> operand(tile);
  sm90::gemm_ss<__half, 64, Into::kZero>(sums, operand, operand);
  sm90::ptx::wgmma_commit();
  if (!kWaits) own(results) = sums.at(0, 0);
  sm90::ptx::wgmma_wait<0>();
  if (kWaits) own(results) = sums.at(0, 0);
}

template <bool kAll>
__global__ void barrier_kernel(const float* ones, float* results) {
  if (kAll || threadIdx.x < kThreads - 32) ptx::barrier_sync<kThreads>(1);
  own(results) = ones[0];
}

template <bool kOnePhase>
__global__ void arrival_kernel(const float* ones, float* results) {
  __shared__ uint64_t mbarrier;
  if (threadIdx.x == 0) ptx::mbarrier_init(mbarrier, kThreads);
  __syncthreads();
  ptx::mbarrier_arrive(mbarrier);
  ptx::mbarrier_wait(mbarrier, 0);
  if (!kOnePhase) ptx::mbarrier_wait(mbarrier, 1);
  own(results) = ones[0];
}

template <bool kTogether>
__global__ void warp_kernel(const float* ones, float* results) {
  const bool first_half = threadIdx.x % 32 < 16;
  if (kTogether || first_half) {
    own(results) = __shfl_sync(~0u, ones[0], 0);
  } else {
    own(results) = static_cast<float>(__ballot_sync(~0u, 1) == ~0u);
  }
}

template <bool kInside>
__global__ void store_kernel(const float* ones, float* results) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto* const numbers = reinterpret_cast<float*>(dynamic_smem);
  numbers[kSmemBytes / 4 - (kInside ? 1 : 0)] = ones[0];
  own(results) = ones[0];
}

template <bool kAligned>
__global__ void alignment_kernel(const float* ones, float* results) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  uint32_t matrices[4];
  ptx::ldmatrix_x4(matrices,
                   ptx::smem_address(dynamic_smem) + threadIdx.x % 32 * 16 + (kAligned ? 0 : 8));
  own(results) = ones[0];
}

// Of the 248 that each thread has, some give back the 8 that others ask for.
template <bool kGivesBack>
__global__ void registers_kernel(const float* ones, float* results) {
  if (threadIdx.x < kThreads / 2) {
    sm90::ptx::lower_registers<kGivesBack ? 240 : 248>();
  } else {
    sm90::ptx::raise_registers<256>();
  }
  own(results) = ones[0];
}

// "right", how many results are not 1, or what the simulator says.
template <auto kKernel>
std::string run() {
  const std::vector<float> ones(kThreads, 1.f);
  std::vector<float> results(kBlocks * kThreads, 0.f);
  try {
    cuda::launch<kKernel>(dim3(kBlocks), kThreads, kSmemBytes, nullptr, ones.data(),
                          results.data());
  } catch (const std::exception& error) {
    return error.what();
  }
  int wrong = 0;
  for (const float result : results) wrong += !(result == 1.f);
  return wrong == 0 ? "right" : "wrong: " + std::to_string(wrong);
}

const std::map<std::string, std::function<std::string()>> kRuns = {
    {"copy", run<copy_kernel<true>>},
    {"copy, not waited for", run<copy_kernel<false>>},
    {"exchange", run<exchange_kernel<true>>},
    {"exchange without a barrier", run<exchange_kernel<false>>},
    {"product", run<product_kernel<true>>},
    {"product, not waited for", run<product_kernel<false>>},
    {"barrier", run<barrier_kernel<true>>},
    {"barrier at which a warp is missing", run<barrier_kernel<false>>},
    {"arrival", run<arrival_kernel<true>>},
    {"arrival, and a phase too many", run<arrival_kernel<false>>},
    {"warp", run<warp_kernel<true>>},
    {"warp in two places", run<warp_kernel<false>>},
    {"store", run<store_kernel<true>>},
    {"store behind the memory", run<store_kernel<false>>},
    {"registers", run<registers_kernel<true>>},
    {"registers that nobody gives back", run<registers_kernel<false>>},
    {"alignment", run<alignment_kernel<true>>},
    {"address of half a row", run<alignment_kernel<false>>}};

}  // namespace flash_attn::tests

extern "C" __attribute__((visibility("default"))) const char* flash_attn_simulate(
    const char* name) {
  static std::string result;
  result = flash_attn::tests::kRuns.at(name)();
  return result.c_str();
}
