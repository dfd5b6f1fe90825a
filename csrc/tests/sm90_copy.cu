// sm90/tile/copy.cuh and tensor_map.h: tiles between global and shared memory by TMA, and rounded
// accumulators into them.
#include "../sm90/tile/copy.cuh"

#include "../sm90/ptx/fence.cuh"
#include "../sm90/tile/ring.cuh"
#include "device_array.cuh"

namespace flash_attn::tests {
namespace {

using sm90::MatrixPlace, sm90::Ring, sm90::RingBarriers, sm90::SequenceBox, sm90::TensorShape;

// Rows begin … begin + len - 1 of a tensor at one head and batch entry.
struct Sequence {
  int64_t rows, begin;  // rows: of the tensor
  int len, head, batch;

  __device__ __forceinline__ MatrixPlace place() const {
    return {.box = SequenceBox(rows, begin, len), .head = head, .batch = batch};
  }
};

// A tensor in memory, poisoned but for the sequence that a test is about.
struct Tensor {
  TensorShape shape;
  Strides strides;
  Sequence sequence;

  // A random one with `cols` columns; heads inside rows or rows inside heads, gaps between.
  Tensor(Random& random, DType dtype, int cols) {
    const auto sometimes_one = [&](int most) {
      return random.integer(0, 2) == 0 ? 1 : random.integer(1, most);
    };
    shape = {.dtype = dtype,
             .cols = cols,
             .rows = sometimes_one(400),
             .heads = sometimes_one(4),
             .batch = sometimes_one(3)};
    const auto gap = [&] { return 8 * random.integer(0, 2); };
    const int rows = static_cast<int>(shape.rows);
    if (random.integer(0, 1) == 0) {
      strides.head = cols + gap();
      strides.row = strides.head * shape.heads + gap();
      strides.batch = strides.row * rows + gap();
    } else {
      strides.row = cols + gap();
      strides.head = strides.row * rows + gap();
      strides.batch = strides.head * shape.heads + gap();
    }
    // Half of the sequences end where the tensor ends, and half begin where it begins.
    const int begin = random.integer(0, 1) * random.integer(0, rows - 1);
    const int len = random.integer(0, 1) == 0 ? rows - begin : random.integer(1, rows - begin);
    sequence = {.rows = rows,
                .begin = begin,
                .len = len,
                .head = random.integer(0, shape.heads - 1),
                .batch = random.integer(0, shape.batch - 1)};
  }

  int64_t size() const {
    return (shape.batch - 1) * strides.batch + (shape.rows - 1) * strides.row +
           (shape.heads - 1) * strides.head + shape.cols;
  }
  int64_t index(int row, int col) const {
    return sequence.batch * strides.batch + (sequence.begin + row) * strides.row +
           sequence.head * strides.head + col;
  }
  CUtensorMap map(const void* data, int box_cols, int box_rows) const {
    // The stride of a dimension of size 1 means nothing and may be anything.
    Strides any = strides;
    if (shape.rows == 1) any.row = 1;
    if (shape.heads == 1) any.head = 3;
    if (shape.batch == 1) any.batch = 0;
    return sm90::make_tensor_map(data, any, shape, box_cols, box_rows);
  }
};

constexpr int kLoadThreads = 128;

template <typename Tile>
struct LoadStorage {
  alignas(1024) Tile tile;
  unsigned char behind[1024];
  RingBarriers<1> ring;
};

// By all threads.
__device__ __forceinline__ void poison(void* bytes, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    static_cast<unsigned char*>(bytes)[i] = 0xff;
}

template <typename Tile>
__device__ __forceinline__ void write_image(Tile& tile, typename Tile::Element* image) {
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols; i += blockDim.x) {
    image[i] = *tile.pointer(i / Tile::kCols, i % Tile::kCols);
  }
}

// image: kRows × kCols, what lies in the tile after the load; behind: 1024 bytes after the tile.
template <typename Tile>
__global__ void __launch_bounds__(kLoadThreads)
    load_kernel(const __grid_constant__ CUtensorMap map, Sequence sequence, int first_row,
                int num_cols, typename Tile::Element* image, unsigned char* behind) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<LoadStorage<Tile>*>(dynamic_smem);
  poison(&smem, sizeof(smem.tile) + sizeof(smem.behind));
  __syncthreads();
  sm90::zero_absent_slabs(smem.tile, num_cols, threadIdx.x, kLoadThreads);
  if (threadIdx.x == 0) {
    smem.ring.init(1, 1);
    sm90::ptx::fence_mbarrier_init();
  }
  sm90::ptx::fence_async_shared();
  __syncthreads();
  const Ring<1> ring(smem.ring);
  if (threadIdx.x == 0) {
    ring.expect_bytes(sm90::loaded_bytes<Tile>(num_cols));
    sm90::load_tile(smem.tile, map, sequence.place(), first_row, num_cols, ring.full(),
                    sm90::ptx::CacheHint::kEvictFirst);
  }
  ring.wait_full();
  write_image(smem.tile, image);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(smem.behind)); i += kLoadThreads) {
    behind[i] = smem.behind[i];
  }
}

template <typename Element, int kRows, int kCols>
void test_load_tile(Random& random) {
  using Tile = SmemTile<Element, kRows, kCols>;
  for (int draw = 0; draw < 24; ++draw) {
    const int num_cols = draw % 4 == 0 ? kCols : 8 * random.integer(1, kCols / 8);
    const Tensor tensor(random, kDTypeOf<Element>, num_cols);
    const Sequence& sequence = tensor.sequence;
    const int first_row = random.integer(0, 1) * random.integer(0, sequence.len - 1);

    std::vector<Element> memory(tensor.size(), tests::poison<Element>());
    // Slabs without any column of the tensor are zeros, as are rows and columns beyond it.
    std::vector<Element> expected(kRows * kCols, rounded<Element>(0.f));
    for (int row = 0; row < sequence.len; ++row) {
      for (int col = 0; col < num_cols; ++col) {
        const auto value = rounded<Element>(random.normal());
        memory[tensor.index(row, col)] = value;
        const int tile_row = row - first_row;
        if (tile_row >= 0 && tile_row < kRows) expected[tile_row * kCols + col] = value;
      }
    }
    DeviceArray<Element> device(memory), image(kRows * kCols);
    DeviceArray<unsigned char> behind(1024);
    cuda::launch<load_kernel<Tile>>(1, kLoadThreads, sizeof(LoadStorage<Tile>), nullptr,
                                    tensor.map(device.data(), Tile::kSlabCols, kRows), sequence,
                                    first_row, num_cols, image.data(), behind.data());
    expect_equal("the tile", image.read(), expected);
    expect_equal("memory behind the tile", behind.read(), std::vector<unsigned char>(1024, 0xff));
  }
}

// zero_absent_slabs alone: the others stay as they are.
template <typename Tile>
__global__ void __launch_bounds__(kLoadThreads)
    zero_kernel(int num_cols, typename Tile::Element* image) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& tile = *reinterpret_cast<Tile*>(dynamic_smem);
  poison(&tile, sizeof(tile));
  __syncthreads();
  sm90::zero_absent_slabs(tile, num_cols, threadIdx.x, kLoadThreads);
  __syncthreads();
  write_image(tile, image);
}

template <typename Element, int kRows, int kCols>
void test_zero_absent_slabs(Random&) {
  using Tile = SmemTile<Element, kRows, kCols>;
  for (int num_cols = 8; num_cols <= kCols; num_cols += 8) {
    DeviceArray<Element> image(kRows * kCols);
    cuda::launch<zero_kernel<Tile>>(1, kLoadThreads, sizeof(Tile), nullptr, num_cols, image.data());
    std::vector<Element> expected(kRows * kCols);
    for (int i = 0; i < kRows * kCols; ++i) {
      const int slab_begin = i % kCols / Tile::kSlabCols * Tile::kSlabCols;
      expected[i] = slab_begin < num_cols ? tests::poison<Element>() : rounded<Element>(0.f);
    }
    expect_equal("the tile", image.read(), expected);
  }
}

// A matrix through a ring of tiles: one thread loads, the other warps write out what comes.
constexpr int kStreamRows = 16, kStreamConsumers = 4;

template <typename Tile, int kStages>
struct StreamStorage {
  alignas(1024) Tile tiles[kStages];
  RingBarriers<kStages> ring;
};

// images: (consumer, tile, kStreamRows, kCols)
template <typename Tile, int kStages>
__global__ void __launch_bounds__(32 * (kStreamConsumers + 1))
    stream_kernel(const __grid_constant__ CUtensorMap map, Sequence sequence, int num_cols,
                  int num_tiles, typename Tile::Element* images) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<StreamStorage<Tile, kStages>*>(dynamic_smem);
  for (Tile& tile : smem.tiles) {
    sm90::zero_absent_slabs(tile, num_cols, threadIdx.x, blockDim.x);
  }
  if (threadIdx.x == 0) {
    smem.ring.init(1, kStreamConsumers);
    sm90::ptx::fence_mbarrier_init();
  }
  sm90::ptx::fence_async_shared();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring<kStages> ring(smem.ring);
  if (warp == kStreamConsumers) {
    if (lane > 0) return;
    for (int i = 0; i < num_tiles; ++i, ring.advance()) {
      ring.wait_empty();
      ring.expect_bytes(sm90::loaded_bytes<Tile>(num_cols));
      sm90::load_tile(smem.tiles[ring.stage()], map, sequence.place(), i * kStreamRows, num_cols,
                      ring.full(), sm90::ptx::CacheHint::kEvictLast);
    }
    return;
  }
  for (int i = 0; i < num_tiles; ++i, ring.advance()) {
    ring.wait_full();
    auto* image = images + (warp * num_tiles + i) * kStreamRows * Tile::kCols;
    for (int j = lane; j < kStreamRows * Tile::kCols; j += 32) {
      image[j] = *smem.tiles[ring.stage()].pointer(j / Tile::kCols, j % Tile::kCols);
    }
    __syncwarp();
    if (lane == 0) ring.arrive_empty();
  }
}

template <typename Element, int kCols, int kStages>
void test_stream(Random& random) {
  using Tile = SmemTile<Element, kStreamRows, kCols>;
  constexpr int kLen = 39 * kStreamRows + 5, kTiles = 40, kNumCols = kCols - 8;
  Tensor tensor(random, kDTypeOf<Element>, kNumCols);
  tensor.shape.rows = kLen;
  tensor.shape.heads = tensor.shape.batch = 1;
  tensor.strides.row = kNumCols;
  tensor.sequence = {.rows = kLen, .begin = 0, .len = kLen, .head = 0, .batch = 0};
  const auto memory = rounded<Element>(normal_numbers(random, kLen * kNumCols));
  std::vector<Element> expected(kStreamConsumers * kTiles * kStreamRows * kCols,
                                rounded<Element>(0.f));
  for (int consumer = 0; consumer < kStreamConsumers; ++consumer) {
    for (int i = 0; i < kLen * kNumCols; ++i) {
      const int row = consumer * kTiles * kStreamRows + i / kNumCols;
      expected[row * kCols + i % kNumCols] = memory[i];
    }
  }
  DeviceArray<Element> device(memory), images(expected.size());
  cuda::launch<stream_kernel<Tile, kStages>>(
      1, 32 * (kStreamConsumers + 1), sizeof(StreamStorage<Tile, kStages>), nullptr,
      tensor.map(device.data(), Tile::kSlabCols, kStreamRows), tensor.sequence, kNumCols, kTiles,
      images.data());
  expect_equal("what consumers saw", images.read(), expected);
}

// An accumulator of kRows × kN to shared memory and on to the matrix, as at the end of a tile: each
// warp its 16 rows. images: (slab, kRows, slab columns), what lies in shared memory.
template <typename Slab, int kN>
__global__ void __launch_bounds__(2 * Slab::kRows)
    store_kernel(const __grid_constant__ CUtensorMap map, Sequence sequence, int first_row,
                 int num_cols, const float* values, typename Slab::Element* images) {
  constexpr int kSlabs = (kN + Slab::kCols - 1) / Slab::kCols;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& slabs = *reinterpret_cast<Slab(*)[kSlabs]>(dynamic_smem);
  poison(slabs, sizeof(slabs));
  __syncthreads();
  const int warp_row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
  Accumulator<1, kN> C;
#pragma unroll
  for (int row = 0; row < C.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < C.kRowElements; ++i) {
      C.at(row, i) = values[(warp_row + fragment_row(row, lane)) * kN + fragment_col(i, lane)];
    }
  }
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    sm90::store_rounded(slabs[slab], C, slab * Slab::kCols, warp_row, lane);
  }
  sm90::ptx::fence_async_shared();
  __syncwarp();
  if (first_row + warp_row < sequence.len && lane == 0) {
    for (int slab = 0; slab < kSlabs; ++slab) {
      const int col = slab * Slab::kCols;
      if (col >= num_cols) break;
      sm90::store_tile_rows<16>(slabs[slab], warp_row, map, sequence.place(), first_row + warp_row,
                                col);
    }
    sm90::ptx::bulk_commit();
    sm90::ptx::bulk_wait_read();
  }
  __syncthreads();
  for (int slab = 0; slab < kSlabs; ++slab) {
    write_image(slabs[slab], images + slab * Slab::kRows * Slab::kCols);
  }
}

// kSlabCols: 64 or 32.
template <typename Element, int kRows, int kN, int kSlabCols>
void test_store(Random& random) {
  using Slab = SmemTile<Element, kRows, kSlabCols>;
  constexpr int kSlabs = (kN + kSlabCols - 1) / kSlabCols;
  for (int draw = 0; draw < 24; ++draw) {
    const int num_cols = draw % 4 == 0 ? kN : 8 * random.integer(1, kN / 8);
    const Tensor tensor(random, kDTypeOf<Element>, num_cols);
    const Sequence& sequence = tensor.sequence;
    const int first_row = random.integer(0, 1) * random.integer(0, sequence.len - 1);
    const auto values = normal_numbers(random, kRows * kN);
    std::vector<Element> memory(tensor.size(), tests::poison<Element>());
    std::vector<Element> in_slabs(kSlabs * kRows * kSlabCols, tests::poison<Element>());
    DeviceArray<Element> device(memory), images(in_slabs.size());
    for (int row = 0; row < kRows; ++row) {
      for (int col = 0; col < kN; ++col) {
        const auto value = rounded<Element>(values[row * kN + col]);
        in_slabs[(col / kSlabCols * kRows + row) * kSlabCols + col % kSlabCols] = value;
        if (first_row + row < sequence.len && col < num_cols) {
          memory[tensor.index(first_row + row, col)] = value;
        }
      }
    }
    DeviceArray<float> device_values(values);
    cuda::launch<store_kernel<Slab, kN>>(1, 2 * kRows, kSlabs * sizeof(Slab), nullptr,
                                         tensor.map(device.data(), kSlabCols, 16), sequence,
                                         first_row, num_cols, device_values.data(), images.data());
    expect_equal("shared memory", images.read(), in_slabs);
    expect_equal("the tensor", device.read(), memory);
  }
}

}  // namespace

void add_sm90_copy_tests(Tests& tests) {
  using Half = __half;
  using Bf16 = __nv_bfloat16;
  tests.push_back({"sm90/load_tile-128x128-bf16", test_load_tile<Bf16, 128, 128>});
  tests.push_back({"sm90/load_tile-64x256-fp16", test_load_tile<Half, 64, 256>});
  tests.push_back({"sm90/load_tile-192x64-bf16", test_load_tile<Bf16, 192, 64>});
  tests.push_back({"sm90/load_tile-80x96-fp16", test_load_tile<Half, 80, 96>});
  tests.push_back({"sm90/load_tile-112x160-bf16", test_load_tile<Bf16, 112, 160>});
  tests.push_back({"sm90/zero_absent_slabs-64x256", test_zero_absent_slabs<Half, 64, 256>});
  tests.push_back({"sm90/zero_absent_slabs-112x160", test_zero_absent_slabs<Bf16, 112, 160>});
  tests.push_back({"sm90/load_tile-ring-of-2", test_stream<Bf16, 128, 2>});
  tests.push_back({"sm90/load_tile-ring-of-3", test_stream<Half, 96, 3>});
  tests.push_back({"sm90/store-128x128-bf16-slab64", test_store<Bf16, 128, 128, 64>});
  tests.push_back({"sm90/store-64x256-fp16-slab64", test_store<Half, 64, 256, 64>});
  tests.push_back({"sm90/store-192x48-bf16-slab64", test_store<Bf16, 192, 48, 64>});
  tests.push_back({"sm90/store-192x80-fp16-slab32", test_store<Half, 192, 80, 32>});
  tests.push_back({"sm90/store-128x160-bf16-slab32", test_store<Bf16, 128, 160, 32>});
}

}  // namespace flash_attn::tests
