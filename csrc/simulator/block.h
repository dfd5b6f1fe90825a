// What the simulator keeps of a launch: its threads, blocks and clusters. Only its own files see
// it.
#pragma once

#include <csetjmp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "machine.h"

namespace flash_attn::simulator {

constexpr int kWarpThreads = 32;
constexpr size_t kStackBytes = 256 * 1024;
constexpr int kSharedBytes = 228 * 1024;

struct Fault {};  // thrown to the end of a block whose launch has failed

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
  std::vector<unsigned char*> memory;  // of each block
};

// What the blocks of a launch share. A runner is a thread of the host that takes one block after
// the other; `turn` says which one runs.
struct Grid {
  dim3 size, block;
  int cluster_size = 1, runners = 1, smem_bytes = 0;
  const std::function<void()>* kernel = nullptr;
  std::deque<Cluster> clusters;

  std::mutex mutex;
  std::condition_variable changed;
  int turn = 0;
  std::vector<bool> over;  // of each runner
  int idle = 0;            // rounds in which nobody could run
  std::string fault;
  bool needs_cluster = false;  // a kernel of clusters was started without them

  int blocks() const { return size.x * size.y * size.z; }
  bool failed() const { return !fault.empty() || needs_cluster; }

  void wait_for_turn(int runner);
  // Another runner's turn, until it is this one's again.
  void pass(int runner);
  void end(int runner);

 private:
  void give_turn_after(int runner);
};

// One block, whose threads are fibers of this thread of the host.
class Block {
 public:
  Block(Grid& grid, int runner) : grid(grid), runner(runner) {}
  void run(int number, const std::function<void()>& kernel, std::vector<Fiber>& fibers);

  // Back to who runs the block; returns when the thread is resumed.
  void leave_fiber();
  void ask_again() { polls_ = true; }
  bool draw() { return random_() & 1; }

  uint3 index{};
  Grid& grid;
  int runner, rank = 0;
  Cluster* cluster = nullptr;
  Fiber* current = nullptr;
  Barrier barriers[16];
  int alive = 0, any = 0;
  int spare_registers = 0;  // for each lane, of all warps together
  std::deque<std::function<void()>> copies;

 private:
  static void enter();
  void resume(Fiber& fiber);
  bool run_warp(std::vector<Fiber>& fibers, int warp);

  const std::function<void()>* kernel_ = nullptr;
  std::jmp_buf scheduler_;
  std::minstd_rand random_;
  bool polls_ = false;
};

extern constinit thread_local Block* running;                      // of this thread of the host
extern constinit thread_local unsigned char memory[kSharedBytes];  // its shared memory

}  // namespace flash_attn::simulator
