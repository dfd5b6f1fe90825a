// sm90/shared_bias_scheduler.cuh: every tile comes once, and those that share a bias side by side.
#include <algorithm>

#include "../sm90/shared_bias_scheduler.cuh"
#include "device_array.cuh"

namespace flash_attn::tests {
namespace {

constexpr int kBlock = 64, kThreads = 64;

template <typename Scheduler>
__global__ void __launch_bounds__(kThreads)
    tiles_kernel(const __grid_constant__ Scheduler scheduler, int num_tiles,
                 TileCoordinates* tiles) {
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) tiles[i] = scheduler.tile(i);
}

struct Shape {
  int batch, heads, blocks;
  BiasParams bias;

  bool shares_sequences() const { return bias.batch_stride == 0; }
  bool shares_heads() const { return bias.head_stride == 0; }

  // How many tiles come together: the most, up to four, that leave none over of those who share.
  int together() const {
    const int sharing = (shares_sequences() ? batch : 1) * (shares_heads() ? heads : 1);
    int most = 1;
    for (int count = 2; count <= 4; ++count) {
      if (sharing % count == 0) most = count;
    }
    return most;
  }
};

Shape random_shape(Random& random) {
  Shape shape = {.batch = random.integer(1, 12),
                 .heads = random.integer(1, 12),
                 .blocks = random.integer(1, 7)};
  shape.bias.batch_stride = random.integer(0, 1) * 4096;
  shape.bias.head_stride = random.integer(0, 1) * 1024;
  return shape;
}

// Of sections of at most as many (sequence, head) pairs as there are.
template <typename Scheduler>
Scheduler random_scheduler(Random& random, const Shape& shape) {
  const int pairs = shape.batch * shape.heads;
  const int seqlen = kBlock * shape.blocks - random.integer(0, kBlock - 1);
  auto scheduler = Scheduler::make(nullptr, 0, seqlen, shape.batch, shape.heads,
                                   int64_t{32 << 20} / random.integer(1, pairs));
  if (random.integer(0, 2) == 0) scheduler.section_heads = 1;
  return scheduler;
}

void expect_tiles(const std::vector<TileCoordinates>& tiles, const Shape& shape) {
  // Behind the tiles that there are is the place of all others.
  const int count = shape.batch * shape.heads * shape.blocks;
  std::vector<int> times(count + 1), once(count + 1, 1), alike, all;
  once[count] = 0;
  const auto within = [](int x, int end) { return x >= 0 && x < end; };
  for (const TileCoordinates& tile : tiles) {
    const bool exists = within(tile.batch_idx, shape.batch) && within(tile.head, shape.heads) &&
                        within(tile.block, shape.blocks);
    ++times[exists ? (tile.batch_idx * shape.heads + tile.head) * shape.blocks + tile.block
                   : count];
  }
  expect_equal("how often a tile comes", times, once);

  const int together = shape.together();
  for (size_t i = 0; i < tiles.size(); ++i) {
    const TileCoordinates &tile = tiles[i], &first = tiles[i - i % together];
    alike.push_back(tile.block == first.block &&
                    (shape.shares_sequences() || tile.batch_idx == first.batch_idx) &&
                    (shape.shares_heads() || tile.head == first.head));
  }
  all.assign(tiles.size(), 1);
  expect_equal("whether a tile reads what its neighbours read", alike, all);
}

// kOrder: of the forward, or of the backward, which has a last section of its own size.
template <TileOrder kOrder>
void test_shared_bias(Random& random) {
  using Scheduler = sm90::SharedBiasScheduler<TileScheduler<kBlock, kOrder>>;
  for (int draw = 0; draw < 100; ++draw) {
    const Shape shape = random_shape(random);
    auto scheduler = random_scheduler<Scheduler>(random, shape);
    if (kOrder == TileOrder::kAsTold) {
      scheduler.last_blocks_first = random.integer(0, 1) != 0;
      scheduler.last_section_heads = random.integer(0, shape.batch * shape.heads);
    }
    scheduler.share(shape.bias);
    DeviceArray<TileCoordinates> tiles(scheduler.num_tiles());
    cuda::launch<tiles_kernel<Scheduler>>(1, kThreads, 0, nullptr, scheduler, scheduler.num_tiles(),
                                          tiles.data());
    expect_tiles(tiles.read(), shape);
  }
}

}  // namespace

void add_sm90_scheduler_tests(Tests& tests) {
  tests.push_back({"sm90/shared-bias-forward", test_shared_bias<TileOrder::kLastBlocksFirst>});
  tests.push_back({"sm90/shared-bias-backward", test_shared_bias<TileOrder::kAsTold>});
}

}  // namespace flash_attn::tests
