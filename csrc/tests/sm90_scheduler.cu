// sm90/shared_bias_scheduler.cuh: every tile comes once, and those that share a bias side by side.
// cuda/attn/tile_scheduler.cuh: so does every tile of varlen sequences, in the order that is told.
#include <algorithm>
#include <tuple>

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

// Whole warps look for varlen tiles.
template <typename Scheduler>
__global__ void __launch_bounds__(32)
    varlen_tiles_kernel(const __grid_constant__ Scheduler scheduler, int num_tiles,
                        TileCoordinates* tiles) {
  for (int i = 0; i < num_tiles; ++i) tiles[i] = scheduler.tile(i);
}

// cu_seqlens of up to 80 sequences, some of them empty, and rows before and behind them.
std::vector<int32_t> random_starts(Random& random, int total) {
  std::vector<int32_t> starts(random.integer(2, 81));
  for (int32_t& start : starts) start = random.integer(0, total);
  std::sort(starts.begin(), starts.end());
  if (random.integer(0, 1) == 0) starts[starts.size() / 2] = starts[starts.size() / 2 - 1];
  return starts;
}

// Sequence, head, block.
using Place = std::tuple<int, int, int>;

template <typename Scheduler>
std::vector<Place> expected_places(const Scheduler& scheduler, const std::vector<int32_t>& starts) {
  std::vector<Place> places;
  for (int b = 0; b < scheduler.batch; ++b) {
    const int blocks = (starts[b + 1] - starts[b] + kBlock - 1) / kBlock;
    for (int head = 0; head < scheduler.heads; ++head) {
      for (int i = 0; i < blocks; ++i) {
        places.emplace_back(b, head, scheduler.last_blocks_first ? blocks - 1 - i : i);
      }
    }
  }
  if (!scheduler.sequence_by_sequence) {
    std::stable_sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
      return std::get<1>(a) < std::get<1>(b);
    });
  }
  return places;
}

// Where sequences overlap there is no right order, but no tile may begin in front of its sequence.
template <bool kOverlaps>
void test_varlen(Random& random) {
  using Scheduler = TileScheduler<kBlock, TileOrder::kAsTold>;
  for (int draw = 0; draw < 50; ++draw) {
    const int total = random.integer(1, 4000), heads = random.integer(1, 5);
    std::vector<int32_t> starts = random_starts(random, total);
    if (kOverlaps) {
      for (int32_t& start : starts) start = random.integer(-total, 2 * total);
    }
    const int batch = static_cast<int>(starts.size()) - 1;
    DeviceArray<int32_t> cu_seqlens(starts);
    Scheduler scheduler = Scheduler::make(cu_seqlens.data(), total, 0, batch, heads, 0);
    scheduler.sequence_by_sequence = random.integer(0, 1) != 0;
    scheduler.last_blocks_first = random.integer(0, 1) != 0;
    DeviceArray<TileCoordinates> tiles(scheduler.num_tiles());
    cuda::launch<varlen_tiles_kernel<Scheduler>>(1, 32, 0, nullptr, scheduler,
                                                 scheduler.num_tiles(), tiles.data());

    std::vector<int> within;
    std::vector<Place> places;
    for (const auto& [b, head, block] : tiles.read()) {
      within.push_back(b >= -1 && b <= batch && head >= 0 && head < heads && block >= 0);
      if (b < 0 || b == batch || block * kBlock >= starts[b + 1] - starts[b]) continue;
      places.emplace_back(b, head, block);
    }
    expect_equal("whether a tile lies in or behind a sequence", within,
                 std::vector<int>(within.size(), 1));
    if (kOverlaps) continue;
    const std::vector<Place> expected = expected_places(scheduler, starts);
    std::vector<int> is_next;
    for (size_t i = 0; i < expected.size(); ++i) {
      is_next.push_back(i < places.size() && places[i] == expected[i]);
    }
    expect_equal("whether a tile is the next one", is_next, std::vector<int>(expected.size(), 1));
    expect_equal("how many tiles come", {static_cast<int>(places.size())},
                 std::vector<int>{static_cast<int>(expected.size())});
  }
}

}  // namespace

void add_sm90_scheduler_tests(Tests& tests) {
  tests.push_back({"sm90/shared-bias-forward", test_shared_bias<TileOrder::kLastBlocksFirst>});
  tests.push_back({"sm90/shared-bias-backward", test_shared_bias<TileOrder::kAsTold>});
  tests.push_back({"sm90/varlen-tiles", test_varlen</*kOverlaps=*/false>});
  tests.push_back({"sm90/varlen-tiles-that-overlap", test_varlen</*kOverlaps=*/true>});
}

}  // namespace flash_attn::tests
