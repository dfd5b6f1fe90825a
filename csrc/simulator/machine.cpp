#include "machine.h"

#include <csetjmp>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

// The kernels' own names for their dynamic shared memory. wgmma's descriptors hold 18 bits of an
// address, so that of the Hopper kernels is where addresses begin.
namespace {
constexpr int kSharedBytes = 228 * 1024;
}
namespace flash_attn::sm80 {
extern thread_local unsigned char dynamic_smem[];
alignas(1024) thread_local unsigned char dynamic_smem[kSharedBytes];
}  // namespace flash_attn::sm80
namespace flash_attn::sm90 {
extern thread_local unsigned char dynamic_smem[];
alignas(1024) thread_local unsigned char dynamic_smem[kSharedBytes];
}  // namespace flash_attn::sm90
namespace flash_attn::cuda {
extern thread_local char smem_bytes[];
alignas(1024) thread_local char smem_bytes[kSharedBytes];
}  // namespace flash_attn::cuda

namespace flash_attn::simulator {
namespace {

constexpr int kWarpThreads = 32;
constexpr size_t kStackBytes = 256 * 1024;
constexpr int kRunners = 8;  // blocks that are on the GPU at a time
constexpr int kIdleRounds = 2000;
constexpr int kPoison = 0xff;  // NaN in every floating-point type, -1 as an integer

struct Fault {};

struct Fiber : Thread {
  std::jmp_buf at;
  char* stack = nullptr;
  bool started = false, done = false;
  const std::function<bool()>* ready = nullptr;
};

struct Barrier {
  int arrived = 0, threads = 0;
  unsigned round = 0;
};

struct Cluster {
  int blocks = 0, arrived = 0;
  unsigned round = 0;
  std::vector<unsigned char*> memory;
  std::vector<int> ended;
};

struct Grid;

}  // namespace

class Block {
 public:
  Block(Grid& grid, int runner) : grid_(grid), runner_(runner) {}
  void run(int number, const std::function<void()>& kernel, std::vector<Fiber>& fibers);

  void leave_fiber();
  void ask_again() { polls_ = true; }
  bool draw() { return random_() & 1; }

  uint3 index{};
  Grid& grid_;
  int runner_, rank = 0;
  Cluster* cluster = nullptr;
  Fiber* current = nullptr;
  Barrier barriers[16];
  int alive = 0, any = 0, all = 1;
  std::deque<std::function<void()>> copies;

 private:
  static void enter();
  void resume(Fiber& fiber);
  bool run_warp(std::vector<Fiber>& fibers, int warp);

  const std::function<void()>* kernel_ = nullptr;
  std::jmp_buf scheduler_;
  ucontext_t main_{};
  std::minstd_rand random_;
  bool polls_ = false;
};

namespace {

thread_local Block* running = nullptr;

// What the blocks that are on the GPU share. `turn` says which runner runs.
struct Grid {
  dim3 size, block;
  int cluster_size = 1, runners = 1, smem_bytes = 0;
  const std::function<void()>* kernel = nullptr;
  std::deque<Cluster> clusters;

  std::mutex mutex;
  std::condition_variable changed;
  int turn = 0;
  std::vector<bool> over;
  int idle = 0;
  std::string fault;
  bool needs_cluster = false;

  int blocks() const { return size.x * size.y * size.z; }

  // Another block's turn, until it is this one's again.
  void pass(int runner) {
    std::unique_lock lock(mutex);
    for (int step = 1; step <= runners; ++step) {
      const int next = (runner + step) % runners;
      if (!over[next]) {
        turn = next;
        break;
      }
    }
    if (turn == runner) return;
    changed.notify_all();
    changed.wait(lock, [&] { return turn == runner; });
  }

  void end(int runner) {
    over[runner] = true;
    std::unique_lock lock(mutex);
    for (int step = 1; step <= runners; ++step) {
      const int next = (runner + step) % runners;
      if (!over[next]) {
        turn = next;
        changed.notify_all();
        return;
      }
    }
  }
};

unsigned char* own_memory() { return sm90::dynamic_smem; }

void poison(int bytes) {
  std::memset(sm80::dynamic_smem, kPoison, kSharedBytes);
  std::memset(sm90::dynamic_smem, kPoison, kSharedBytes);
  std::memset(cuda::smem_bytes, kPoison, kSharedBytes);
  (void)bytes;
}

// Nobody may have written behind the dynamic shared memory that the launch asked for.
bool is_poisoned_behind(int bytes) {
  const auto whole = [bytes](const auto* memory) {
    return std::all_of(memory + bytes, memory + kSharedBytes,
                       [](auto byte) { return static_cast<unsigned char>(byte) == kPoison; });
  };
  return whole(sm80::dynamic_smem) && whole(sm90::dynamic_smem) && whole(cuda::smem_bytes);
}

unsigned seed() {
  static const unsigned value = [] {
    const char* text = std::getenv("FLASH_ATTN_SIMULATOR_SEED");
    return text == nullptr ? 1u : static_cast<unsigned>(std::atoi(text));
  }();
  return value;
}

std::string place() {
  const Block& block = *running;
  std::string text = " (block " + std::to_string(block.index.x) + ", " +
                     std::to_string(block.index.y) + ", " + std::to_string(block.index.z);
  if (block.current != nullptr) {
    text += ", thread " + std::to_string(block.current->index.x);
  }
  return text + ")";
}

}  // namespace

void fault(const char* what) {
  Grid& grid = running->grid_;
  if (grid.fault.empty()) grid.fault = what + place();
  if (running->current == nullptr) throw Fault();
  running->leave_fiber();
  std::abort();  // nobody resumes it
}

// ---- fibers

void Block::enter() {
  Block& block = *running;
  Fiber& self = *block.current;
  (*block.kernel_)();
  if (!self.bulk_copies.empty()) {
    simulator::fault("a thread ends while its bulk copies may still read shared memory");
  }
  self.copies.finish();
  self.warp->alive &= ~(1u << self.lane);
  --block.alive;
  self.done = true;
  block.leave_fiber();
}

void Block::leave_fiber() {
  if (_setjmp(current->at) == 0) _longjmp(scheduler_, 1);
}

void Block::resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler_) == 0) {
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &Block::enter, 0);
    setcontext(&context);
  }
  current = nullptr;
}

// Each thread of the warp that can, to where it waits next. Returns whether one could.
bool Block::run_warp(std::vector<Fiber>& fibers, int warp) {
  bool ran = false;
  const int first = warp * kWarpThreads;
  const int end = std::min<int>(first + kWarpThreads, grid_.block.x);
  for (int i = first; i < end; ++i) {
    Fiber& fiber = fibers[i];
    if (fiber.done || (fiber.ready != nullptr && !(*fiber.ready)())) continue;
    fiber.ready = nullptr;
    ran = true;
    resume(fiber);
    if (!grid_.fault.empty() || grid_.needs_cluster) throw Fault();
  }
  return ran;
}

void Block::run(int number, const std::function<void()>& kernel, std::vector<Fiber>& fibers) {
  const int threads = grid_.block.x, warps = (threads + kWarpThreads - 1) / kWarpThreads;
  index = {number % grid_.size.x, number / grid_.size.x % grid_.size.y,
           number / (grid_.size.x * grid_.size.y)};
  rank = number % grid_.cluster_size;
  cluster = &grid_.clusters[number / grid_.cluster_size];
  cluster->memory[rank] = own_memory();
  kernel_ = &kernel;
  alive = threads;
  random_.seed(seed() + 7919 * number);
  for (Barrier& barrier : barriers) barrier = {};
  poison(grid_.smem_bytes);
  std::vector<Warp> of_block(warps);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    char* stack = fiber.stack;
    fiber = Fiber{};
    fiber.stack = stack;
    fiber.index = {static_cast<unsigned>(i), 0, 0};
    fiber.lane = i % kWarpThreads;
    fiber.warp = &of_block[i / kWarpThreads];
    fiber.warp->alive |= 1u << fiber.lane;
    fiber.block = this;
  }
  while (alive > 0) {
    bool ran = false;
    polls_ = false;
    const int first = random_() % warps;
    for (int i = 0; i < warps; ++i) {
      const int warp = (first + i) % warps;
      for (int step = random_() % 8; step >= 0 && run_warp(fibers, warp); --step) ran = true;
    }
    // A copy that is under way ends now and then, and at the latest when all wait.
    if (!copies.empty() && (!ran || draw())) {
      const size_t which = random_() % copies.size();
      const auto copy = std::move(copies[which]);
      copies.erase(copies.begin() + which);
      copy();
      ran = true;
    }
    if (ran) grid_.idle = 0;
    if (!ran && ++grid_.idle > kIdleRounds * grid_.runners) {
      grid_.fault = "all threads wait for what will not happen" + place();
      throw Fault();
    }
    if (!ran || polls_) {
      grid_.pass(runner_);
      if (!grid_.fault.empty() || grid_.needs_cluster) throw Fault();
      running = this;
    }
  }
  while (!copies.empty()) {
    const auto copy = std::move(copies.front());
    copies.pop_front();
    copy();
  }
  for (const Warp& warp : of_block) {
    if (!warp.products.empty()) {
      grid_.fault = "a warp ends before its products" + place();
      throw Fault();
    }
  }
  if (!is_poisoned_behind(grid_.smem_bytes)) {
    grid_.fault = "a block wrote behind its dynamic shared memory" + place();
    throw Fault();
  }
}

Thread& this_thread() { return *running->current; }
uint3 block_index() { return running->index; }
dim3 block_dimensions() { return running->grid_.block; }
dim3 grid_dimensions() { return running->grid_.size; }

void wait_until(const std::function<bool()>& ready) {
  if (ready()) return;
  running->current->ready = &ready;
  running->leave_fiber();
}

void poll() {
  running->ask_again();
  running->leave_fiber();
}

bool is_quick() { return running->draw(); }

// ---- what threads do together

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
  Grid& grid = running->grid_;
  if (grid.cluster_size == 1) {
    grid.needs_cluster = true;
    running->leave_fiber();
  }
  return running->rank;
}

void cluster_sync() {
  Cluster& cluster = *running->cluster;
  const unsigned round = cluster.round;
  if (++cluster.arrived == cluster.blocks * static_cast<int>(running->grid_.block.x)) {
    cluster.arrived = 0;
    ++cluster.round;
  } else {
    wait_until([&cluster, round] { return cluster.round != round; });
  }
}

// ---- shared memory, copies, mbarriers

uint32_t shared_address(const void* pointer) {
  constexpr ptrdiff_t kReach = 1 << (kRankShift - 1);
  const ptrdiff_t distance = static_cast<const unsigned char*>(pointer) - own_memory();
  if (distance < -kReach || distance >= kReach) fault("the address is not of shared memory");
  return static_cast<uint32_t>(distance) & ((1u << kRankShift) - 1);
}

void* shared_pointer(uint32_t address) {
  const int rank = static_cast<int>(address >> kRankShift) - 1;
  unsigned char* const base = rank < 0 ? own_memory() : running->cluster->memory[rank];
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

// ---- launches

namespace {

// Stacks for the threads of one block at a time.
std::vector<Fiber> make_fibers(int threads) {
  std::vector<Fiber> fibers(threads);
  for (Fiber& fiber : fibers) {
    void* const stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    fiber.stack = static_cast<char*>(stack);
  }
  return fibers;
}

void run_blocks(Grid& grid, int runner) {
  {
    std::unique_lock lock(grid.mutex);
    grid.changed.wait(lock, [&] { return grid.turn == runner; });
  }
  std::vector<Fiber> fibers = make_fibers(grid.block.x);
  try {
    for (int number = runner; number < grid.blocks(); number += grid.runners) {
      if (!grid.fault.empty() || grid.needs_cluster) break;
      Block block(grid, runner);
      running = &block;
      block.run(number, *grid.kernel, fibers);
    }
  } catch (const Fault&) {
  }
  for (Fiber& fiber : fibers) munmap(fiber.stack, kStackBytes);
  grid.end(runner);
}

}  // namespace

void run_grid(dim3 size, int threads, int smem_bytes, const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  // A host compiler does not see __cluster_dims__: a kernel that asks for its rank is one of pairs,
  // and begins again.
  for (const int cluster_size : {1, 2}) {
    Grid grid;
    grid.size = size;
    grid.block = dim3(threads);
    grid.cluster_size = cluster_size;
    grid.smem_bytes = smem_bytes;
    grid.kernel = &kernel;
    if (grid.blocks() == 0) return;
    grid.clusters.resize(grid.blocks() / cluster_size);
    for (Cluster& cluster : grid.clusters) {
      cluster.blocks = cluster_size;
      cluster.memory.resize(cluster_size);
    }
    grid.runners = std::min(kRunners, grid.blocks());
    grid.over.resize(grid.runners);
    std::vector<std::thread> runners;
    for (int runner = 0; runner < grid.runners; ++runner) {
      runners.emplace_back([&grid, runner] { run_blocks(grid, runner); });
    }
    for (std::thread& runner : runners) runner.join();
    if (!grid.fault.empty()) throw std::runtime_error("flash_attn simulator: " + grid.fault);
    if (!grid.needs_cluster) return;
  }
}

}  // namespace flash_attn::simulator
