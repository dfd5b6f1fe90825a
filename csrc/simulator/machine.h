// A GPU for one kernel at a time, on a CPU: threads, warps, blocks, clusters, and what they wait
// for.
//
// A thread of the GPU is a fiber that runs until it has to wait. A block is a thread of the host,
// as its shared memory is thread_local; one block runs at a time, so nothing here needs a lock.
// What a GPU does by itself (copies, products of a warpgroup) is done late, or at a moment drawn at
// random: a kernel that does not wait for it reads what was there before.
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <typeinfo>
#include <vector>

namespace flash_attn::simulator {

class Block;

// The end of a simulated launch that did what a GPU forbids; what launch() throws.
[[noreturn]] void fault(const char* what);

// What lanes of a warp bring to an instruction that they execute together.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  const char* what = nullptr;
  const std::type_info* type = nullptr;
  void* brought[32] = {};
  bool* over[32] = {};
};

// A product of a warpgroup that has been started, as far as it is one warp's.
struct Product {
  int group;  // of how many groups of its warp it is in front
  std::function<void()> run;
};

struct Warp {
  unsigned alive = 0;
  std::vector<Meeting> meetings;
  std::vector<Product> products;  // oldest first
  int committed_groups = 0;

  void run_products(int before_group);
};

// Copies of one thread that are under way, in groups.
struct CopyGroups {
  std::vector<std::vector<std::function<void()>>> closed;
  std::vector<std::function<void()>> open;

  void start(std::function<void()> copy) { open.push_back(std::move(copy)); }
  void commit();
  // Until `pending` of the youngest groups are left.
  void wait(size_t pending);
  void finish();  // those of the open group too
  bool empty() const { return closed.empty() && open.empty(); }
};

struct Thread {
  uint3 index = {};
  int lane = 0;
  Warp* warp = nullptr;
  Block* block = nullptr;
  CopyGroups copies, bulk_copies;
};

Thread& this_thread();
uint3 block_index();
dim3 block_dimensions();
dim3 grid_dimensions();

// Others run until ready().
void wait_until(const std::function<bool()>& ready);
// For whoever asks again and again: other threads and blocks run first.
void poll();

// The lanes of mask meet; the last one to arrive runs act(brought), brought[lane] being a Mine*.
void arrive_at_meeting(unsigned mask, const char* what, const std::type_info& type, void* mine,
                       const std::function<void(void**)>& act);
template <typename Mine, typename Act>
void meet(const char* what, unsigned mask, Mine& mine, const Act& act) {
  arrive_at_meeting(mask, what, typeid(Mine), &mine,
                    [&](void** brought) { act(reinterpret_cast<Mine**>(brought)); });
}

// Barrier number `barrier` of the block; threads: how many arrive, the waiting ones among them.
void barrier_arrive(int barrier, int threads, bool wait);
// A warp's registers become `count` a thread: it waits until other warps have given back what it
// asks for.
void set_registers(int count);
// Barrier 0, and the bitwise or (and) of what its threads bring.
int block_any(int value);
int block_all(int value);

int cluster_rank();
void cluster_sync();

// Shared memory by 32-bit addresses: bits 0-23 from the block's first byte on, as a signed number;
// above it 0 for the own block, or 1 + the rank of another block of the cluster.
uint32_t shared_address(const void* pointer);
void* shared_pointer(uint32_t address);
inline constexpr int kRankShift = 24;

// A copy that the GPU does by itself, some time before whoever waits for what it signals goes on.
void start_copy(std::function<void()> copy);
// True with a probability of a half: whether the GPU is quick this time.
bool is_quick();

void mbarrier_init(uint64_t* mbarrier, int arrivals);
// expected_bytes: what asynchronous copies have to bring besides.
void mbarrier_arrive(uint64_t* mbarrier, int expected_bytes = 0);
void mbarrier_complete(uint64_t* mbarrier, int bytes);
bool mbarrier_has_completed(const uint64_t* mbarrier, uint32_t parity);

// Runs kernel() in every thread of the grid. smem_bytes: of dynamic shared memory.
void run_grid(dim3 grid, int threads, int smem_bytes, const std::function<void()>& kernel);

}  // namespace flash_attn::simulator
