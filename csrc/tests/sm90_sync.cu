// sm90/tile/ring.cuh and sm90/ptx/warpgroup.cuh: who waits for whom.
#include "../sm90/ptx/fence.cuh"
#include "../sm90/ptx/warpgroup.cuh"
#include "../sm90/tile/ring.cuh"
#include "device_array.cuh"

namespace flash_attn::tests {
namespace {

using sm90::Ring, sm90::RingBarriers;

// Sleeps now and then, so that everyone is at times the first and at times the last: up to 2 µs in
// one of eight turns.
__device__ __forceinline__ void dawdle(uint32_t seed, int who, int turn) {
  uint32_t x = seed ^ (who * 0x9e3779b9u) ^ (turn * 0x85ebca6bu);
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  if (x >> 29 == 0) __nanosleep(x & 2047);
}

constexpr int kRingConsumers = 5;  // warps

// One warp fills stages of 32 numbers, the others copy them out. All lanes say that a stage is
// full, and empty_lanes of each consumer that it is empty. seen: (consumer, turn, 32)
template <int kStages>
__global__ void __launch_bounds__(32 * (kRingConsumers + 1))
    ring_kernel(const float* numbers, int turns, int empty_lanes, uint32_t seed, float* seen) {
  __shared__ RingBarriers<kStages> barriers;
  __shared__ float stages[kStages][32];
  if (threadIdx.x == 0) {
    barriers.init(32, kRingConsumers * empty_lanes);
    sm90::ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring<kStages> ring(barriers);
  if (warp == kRingConsumers) {
    for (int turn = 0; turn < turns; ++turn, ring.advance()) {
      dawdle(seed, warp, turn);
      ring.wait_empty();
      stages[ring.stage()][lane] = numbers[turn * 32 + lane];
      ring.arrive_full();
    }
    return;
  }
  for (int turn = 0; turn < turns; ++turn, ring.advance()) {
    ring.wait_full();
    dawdle(seed, warp, turn);
    seen[(warp * turns + turn) * 32 + lane] = stages[ring.stage()][lane];
    __syncwarp();
    if (lane < empty_lanes) ring.arrive_empty();
  }
}

template <int kStages, int kEmptyLanes>
void test_ring(Random& random) {
  constexpr int kTurns = 1000;
  const auto numbers = normal_numbers(random, kTurns * 32);
  std::vector<float> expected;
  for (int consumer = 0; consumer < kRingConsumers; ++consumer) {
    expected.insert(expected.end(), numbers.begin(), numbers.end());
  }
  DeviceArray<float> device(numbers), seen(expected.size());
  cuda::launch<ring_kernel<kStages>>(1, 32 * (kRingConsumers + 1), 0, nullptr, device.data(),
                                     kTurns, kEmptyLanes, uint32_t(random.integer(0, 1 << 30)),
                                     seen.data());
  expect_equal("what consumers saw", seen.read(), expected);
}

// Warpgroups take turns through one named barrier each, as the forward's consumers do: who has
// waited writes its number behind the last one's.
template <int kGroups>
__global__ void __launch_bounds__(128 * kGroups) turns_kernel(int turns, uint32_t seed, int* log) {
  __shared__ int next;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == kGroups - 1) sm90::ptx::barrier_arrive<256>(1);
  for (int turn = 0; turn < turns; ++turn) {
    dawdle(seed, group, turn);
    sm90::ptx::barrier_sync<256>(1 + group);
    if (threadIdx.x % 128 == turn % 128) log[next++] = group;
    sm90::ptx::barrier_arrive<256>(1 + (group + 1) % kGroups);
  }
}

template <int kGroups>
void test_turns(Random& random) {
  constexpr int kTurns = 500;
  std::vector<int> expected(kTurns * kGroups);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = i % kGroups;
  DeviceArray<int> log(expected.size());
  cuda::launch<turns_kernel<kGroups>>(1, 128 * kGroups, 0, nullptr, kTurns,
                                      uint32_t(random.integer(0, 1 << 30)), log.data());
  expect_equal("whose turn it was", log.read(), expected);
}

__global__ void elect_kernel(int* elected) { elected[threadIdx.x] = sm90::ptx::elect_one(); }

void test_elect_one(Random&) {
  constexpr int kWarps = 8;
  DeviceArray<int> elected(32 * kWarps);
  cuda::launch<elect_kernel>(1, 32 * kWarps, 0, nullptr, elected.data());
  const auto flags = elected.read();
  std::vector<int> of_warp(kWarps);
  for (int i = 0; i < 32 * kWarps; ++i) of_warp[i / 32] += flags[i];
  expect_equal("lanes elected in each warp", of_warp, std::vector<int>(kWarps, 1));
}

// Two warpgroups of three hold 200 numbers a thread, more than a third of the registers: only with
// those that the third gave back. A number and the sum of all of its thread: (number, thread).
constexpr int kHeld = 200, kHolders = 256;

__global__ void __launch_bounds__(kHolders + 128, 1)
    registers_kernel(const float* numbers, float* results) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  if (warp < 4) {
    sm90::ptx::lower_registers<24>();
  } else {
    sm90::ptx::raise_registers<240>();
    const int thread = threadIdx.x - 128;
    float held[kHeld], sum = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = numbers[i * kHolders + thread];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum += held[i];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) results[i * kHolders + thread] = held[i] + sum;
  }
}

void test_setmaxnreg(Random& random) {
  const auto numbers = whole_numbers(random, kHeld * kHolders);
  auto expected = numbers;
  for (int thread = 0; thread < kHolders; ++thread) {
    float sum = 0;
    for (int i = 0; i < kHeld; ++i) sum += numbers[i * kHolders + thread];
    for (int i = 0; i < kHeld; ++i) expected[i * kHolders + thread] += sum;
  }
  DeviceArray<float> device(numbers), results(expected.size());
  // More blocks than multiprocessors: the registers are there again when a block ends.
  cuda::launch<registers_kernel>(300, kHolders + 128, 0, nullptr, device.data(), results.data());
  expect_equal("results", results.read(), expected);
}

}  // namespace

void add_sm90_sync_tests(Tests& tests) {
  tests.push_back({"sm90/ring-of-1", test_ring<1, 32>});
  tests.push_back({"sm90/ring-of-1-one-lane", test_ring<1, 1>});
  tests.push_back({"sm90/ring-of-2", test_ring<2, 32>});
  tests.push_back({"sm90/ring-of-2-one-lane", test_ring<2, 1>});
  tests.push_back({"sm90/ring-of-3", test_ring<3, 32>});
  tests.push_back({"sm90/ring-of-3-one-lane", test_ring<3, 1>});
  tests.push_back({"sm90/ring-of-4", test_ring<4, 32>});
  tests.push_back({"sm90/ring-of-4-one-lane", test_ring<4, 1>});
  tests.push_back({"sm90/turns-of-2", test_turns<2>});
  tests.push_back({"sm90/turns-of-3", test_turns<3>});
  tests.push_back({"sm90/elect_one", test_elect_one});
  tests.push_back({"sm90/setmaxnreg", test_setmaxnreg});
}

}  // namespace flash_attn::tests
