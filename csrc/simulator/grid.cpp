// Launches.
#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <thread>

#include "block.h"

namespace flash_attn::simulator {

void Grid::give_turn_after(int runner) {
  for (int step = 1; step <= runners; ++step) {
    const int next = (runner + step) % runners;
    if (over[next]) continue;
    turn = next;
    return changed.notify_all();
  }
}

void Grid::wait_for_turn(int runner) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return turn == runner; });
}

void Grid::pass(int runner) {
  {
    const std::lock_guard lock(mutex);
    give_turn_after(runner);
  }
  wait_for_turn(runner);
}

void Grid::end(int runner) {
  const std::lock_guard lock(mutex);
  over[runner] = true;
  give_turn_after(runner);
}

namespace {

constexpr int kRunners = 8;  // blocks that are on the GPU at a time

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
  grid.wait_for_turn(runner);
  std::vector<Fiber> fibers = make_fibers(grid.block.x);
  try {
    for (int number = runner; number < grid.blocks(); number += grid.runners) {
      if (grid.failed()) break;
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
