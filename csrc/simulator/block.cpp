// A block: its threads as fibers, and who runs next.
#include "block.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace flash_attn::simulator {
constinit thread_local Block* running = nullptr;
alignas(1024) constinit thread_local unsigned char memory[kSharedBytes] = {};
}  // namespace flash_attn::simulator

// The kernels' own names for it.
#define FLASH_ATTN_IS_MEMORY __attribute__((alias("_ZN10flash_attn9simulator6memoryE")))
namespace flash_attn::cuda {
extern thread_local char smem_bytes[] FLASH_ATTN_IS_MEMORY;
}
namespace flash_attn::sm80 {
extern thread_local unsigned char dynamic_smem[] FLASH_ATTN_IS_MEMORY;
}
namespace flash_attn::sm90 {
extern thread_local unsigned char dynamic_smem[] FLASH_ATTN_IS_MEMORY;
}
namespace flash_attn::tests {
extern thread_local unsigned char dynamic_smem[] FLASH_ATTN_IS_MEMORY;
}

namespace flash_attn::simulator {
namespace {

constexpr int kIdleRounds = 2000;
constexpr int kPoison = 0xff;  // NaN in every floating-point type, -1 as an integer

// Nobody may have written behind the dynamic shared memory that the launch asked for.
bool is_poisoned_from(int byte) {
  return std::all_of(memory + byte, memory + kSharedBytes,
                     [](unsigned char value) { return value == kPoison; });
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
  Grid& grid = running->grid;
  if (grid.fault.empty()) grid.fault = what + place();
  if (running->current == nullptr) throw Fault();
  running->leave_fiber();
  __builtin_unreachable();  // nobody resumes it
}

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
  const int end = std::min<int>(first + kWarpThreads, grid.block.x);
  for (int i = first; i < end; ++i) {
    Fiber& fiber = fibers[i];
    if (fiber.done || (fiber.ready != nullptr && !(*fiber.ready)())) continue;
    fiber.ready = nullptr;
    ran = true;
    resume(fiber);
    if (grid.failed()) throw Fault();
  }
  return ran;
}

void Block::run(int number, const std::function<void()>& kernel, std::vector<Fiber>& fibers) {
  const int threads = grid.block.x, warps = (threads + kWarpThreads - 1) / kWarpThreads;
  index = {number % grid.size.x, number / grid.size.x % grid.size.y,
           number / (grid.size.x * grid.size.y)};
  rank = number % grid.cluster_size;
  cluster = &grid.clusters[number / grid.cluster_size];
  cluster->memory[rank] = memory;
  kernel_ = &kernel;
  alive = threads;
  random_.seed(seed() + 7919 * number);
  for (Barrier& barrier : barriers) barrier = {};
  spare_registers = 0;
  std::memset(memory, kPoison, kSharedBytes);
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
    if (ran) grid.idle = 0;
    if (!ran && ++grid.idle > kIdleRounds * grid.runners) {
      grid.fault = "all threads wait for what will not happen" + place();
      throw Fault();
    }
    if (!ran || polls_) {
      grid.pass(runner);
      if (grid.failed()) throw Fault();
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
      grid.fault = "a warp ends before its products" + place();
      throw Fault();
    }
  }
  if (!is_poisoned_from(grid.smem_bytes)) {
    grid.fault = "a block wrote behind its dynamic shared memory" + place();
    throw Fault();
  }
}

Thread& this_thread() { return *running->current; }
uint3 block_index() { return running->index; }
dim3 block_dimensions() { return running->grid.block; }
dim3 grid_dimensions() { return running->grid.size; }

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

}  // namespace flash_attn::simulator
