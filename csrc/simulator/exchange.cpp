// What threads do together, and what the GPU does for them: meetings, barriers, copies, mbarriers.
#include <algorithm>
#include <cstring>
#include <string>

#include "block.h"

namespace flash_attn::simulator {

void arrive_at_meeting(unsigned mask, const char* what, const std::type_info& type, void* mine,
                       const std::function<void(void**)>& act) {
  Thread& self = this_thread();
  Warp& warp = *self.warp;
  mask &= warp.alive;
  if ((mask >> self.lane & 1) == 0) fault("a thread meets others under a mask without itself");
  const auto same = [mask](const Meeting& meeting) { return meeting.mask == mask; };
  auto found = std::find_if(warp.meetings.begin(), warp.meetings.end(), same);
  if (found == warp.meetings.end()) {
    warp.meetings.push_back({.mask = mask, .what = what, .type = &type});
    found = warp.meetings.end() - 1;
  }
  if (std::strcmp(found->what, what) != 0 || *found->type != type) {
    static thread_local std::string text;
    text = std::string("lanes of a warp meet at ") + found->what + " and at " + what;
    fault(text.c_str());
  }
  found->arrived |= 1u << self.lane;
  found->brought[self.lane] = mine;
  bool over = false;
  found->over[self.lane] = &over;
  if (found->arrived != mask) return wait_until([&over] { return over; });
  Meeting meeting = *found;
  warp.meetings.erase(found);
  act(meeting.brought);
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    if (meeting.over[lane] != nullptr) *meeting.over[lane] = true;
  }
}

void barrier_arrive(int number, int threads, bool wait) {
  Barrier& barrier = running->barriers[number];
  if (barrier.arrived > 0 && barrier.threads != threads) {
    fault("threads arrive at one barrier with different numbers of threads");
  }
  barrier.threads = threads;
  const unsigned round = barrier.round;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.round;
  } else if (wait) {
    wait_until([&barrier, round] { return barrier.round != round; });
  }
}

void set_registers(int count) {
  int mine = 0;
  meet("setmaxnreg", ~0u, mine, [](int**) {});
  // What a launch deals out: the same to all threads, in eights, of 64 Ki registers, and at most
  // 255.
  Block& block = *running;
  const int at_start = std::min(65536 / static_cast<int>(block.grid.block.x), 255) / 8 * 8;
  const int more = count - at_start;
  if (this_thread().lane == 0) {
    wait_until([&block, more] { return block.spare_registers >= more; });
    block.spare_registers -= more;
  }
  meet("setmaxnreg", ~0u, mine, [](int**) {});
}

int block_any(int value) {
  Block& block = *running;
  block.any = 0;
  barrier_arrive(0, block.alive, true);
  block.any |= value != 0;
  barrier_arrive(0, block.alive, true);
  const int result = block.any;
  barrier_arrive(0, block.alive, true);
  return result;
}

int block_all(int value) { return !block_any(value == 0); }

int cluster_rank() {
  Grid& grid = running->grid;
  if (grid.cluster_size == 1) {
    grid.needs_cluster = true;
    running->leave_fiber();
  }
  return running->rank;
}

void cluster_sync() {
  Cluster& cluster = *running->cluster;
  const unsigned round = cluster.round;
  if (++cluster.arrived == cluster.blocks * static_cast<int>(running->grid.block.x)) {
    cluster.arrived = 0;
    ++cluster.round;
  } else {
    wait_until([&cluster, round] { return cluster.round != round; });
  }
}

// ---- shared memory, copies, mbarriers

uint32_t shared_address(const void* pointer) {
  constexpr ptrdiff_t kReach = 1 << (kRankShift - 1);
  const ptrdiff_t distance = static_cast<const unsigned char*>(pointer) - memory;
  if (distance < -kReach || distance >= kReach) fault("the address is not of shared memory");
  return static_cast<uint32_t>(distance) & ((1u << kRankShift) - 1);
}

void* shared_pointer(uint32_t address) {
  const int rank = static_cast<int>(address >> kRankShift) - 1;
  unsigned char* const base = rank < 0 ? memory : running->cluster->memory[rank];
  const int unused = 32 - kRankShift;
  return base + (static_cast<int32_t>(address << unused) >> unused);
}

void Warp::run_products(int before_group) {
  while (!products.empty() && products.front().group < before_group) {
    const Product product = std::move(products.front());
    products.erase(products.begin());
    product.run();
  }
}

void CopyGroups::commit() {
  closed.push_back(std::move(open));
  open.clear();
}

void CopyGroups::wait(size_t pending) {
  while (closed.size() > pending) {
    for (const auto& copy : closed.front()) copy();
    closed.erase(closed.begin());
  }
}

void CopyGroups::finish() {
  wait(0);
  for (const auto& copy : open) copy();
  open.clear();
}

void start_copy(std::function<void()> copy) { running->copies.push_back(std::move(copy)); }

namespace {

// The 64 bits of an mbarrier.
struct Mbarrier {
  int32_t bytes;  // still to come
  int16_t pending;
  uint16_t expected : 15, phase : 1;
};
static_assert(sizeof(Mbarrier) == sizeof(uint64_t));

Mbarrier& as_mbarrier(uint64_t* mbarrier) { return *reinterpret_cast<Mbarrier*>(mbarrier); }

void end_phase_if_complete(Mbarrier& mbarrier) {
  if (mbarrier.pending < 0) fault("more arrivals at an mbarrier than its phase expects");
  if (mbarrier.pending > 0 || mbarrier.bytes != 0) return;
  mbarrier.pending = static_cast<int16_t>(mbarrier.expected);
  mbarrier.phase ^= 1;
}

}  // namespace

void mbarrier_init(uint64_t* mbarrier, int arrivals) {
  as_mbarrier(mbarrier) = {.bytes = 0,
                           .pending = static_cast<int16_t>(arrivals),
                           .expected = static_cast<uint16_t>(arrivals),
                           .phase = 0};
}

void mbarrier_arrive(uint64_t* mbarrier, int expected_bytes) {
  Mbarrier& state = as_mbarrier(mbarrier);
  state.bytes += expected_bytes;
  --state.pending;
  end_phase_if_complete(state);
}

void mbarrier_complete(uint64_t* mbarrier, int bytes) {
  Mbarrier& state = as_mbarrier(mbarrier);
  state.bytes -= bytes;
  end_phase_if_complete(state);
}

bool mbarrier_has_completed(const uint64_t* mbarrier, uint32_t parity) {
  return as_mbarrier(const_cast<uint64_t*>(mbarrier)).phase != parity;
}

}  // namespace flash_attn::simulator
