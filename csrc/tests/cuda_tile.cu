// cuda/tile/: copies into swizzled tiles, products of one warp, rounded accumulators back into
// tiles.
#include "../cuda/ptx/cp_async.cuh"
#include "../cuda/tile/copy.cuh"
#include "../cuda/tile/gemm.cuh"
#include "../cuda/tile/store.cuh"
#include "../cuda/tile/store_operand.cuh"
#include "../cuda/tile/warp_grid.cuh"
#include "device_array.cuh"

namespace flash_attn::tests {
namespace {

constexpr int kLoadThreads = 128;

// image: the tile row by row.
template <typename Tile>
__global__ void __launch_bounds__(kLoadThreads)
    tile_loader_kernel(const typename Tile::Element* matrix, int64_t row_stride, int num_cols,
                       int first_row, int num_rows, int skipped_rows,
                       typename Tile::Element* image) {
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& tile = *reinterpret_cast<Tile*>(dynamic_smem);
  const TileLoader<Tile, kLoadThreads> loader(matrix, row_stride, num_cols, threadIdx.x);
  if (skipped_rows == 0) {
    loader.load(tile, first_row, num_rows);
  } else {
    loader.load(tile, first_row, num_rows, skipped_rows);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols; i += kLoadThreads) {
    image[i] = *tile.pointer(i / Tile::kCols, i % Tile::kCols);
  }
}

template <typename Element, int kRows, int kCols>
void test_tile_loader(Random& random) {
  using Tile = SmemTile<Element, kRows, kCols>;
  for (int draw = 0; draw < 24; ++draw) {
    const int num_cols = draw % 4 == 0 ? kCols : 8 * random.integer(1, kCols / 8);
    const int num_rows = random.integer(1, 3 * kRows), stride = num_cols + 8 * random.integer(0, 2);
    const int first_row = random.integer(0, 1) * random.integer(0, num_rows);
    const int skipped_rows = random.integer(0, 1) * random.integer(0, num_rows);
    std::vector<Element> matrix(num_rows * stride, poison<Element>());
    std::vector<Element> expected(kRows * kCols, rounded<Element>(0.f));
    for (int row = skipped_rows; row < num_rows; ++row) {
      for (int col = 0; col < num_cols; ++col) {
        const auto value = rounded<Element>(random.normal());
        matrix[row * stride + col] = value;
        const int tile_row = row - first_row;
        if (tile_row >= 0 && tile_row < kRows) expected[tile_row * kCols + col] = value;
      }
    }
    DeviceArray<Element> device(matrix), image(expected.size());
    cuda::launch<tile_loader_kernel<Tile>>(1, kLoadThreads, sizeof(Tile), nullptr, device.data(),
                                           int64_t{stride}, num_cols, first_row, num_rows,
                                           skipped_rows, image.data());
    expect_equal("the tile", image.read(), expected);
  }
}

// Products of one warp: rows of A in kMBlocks blocks of 16, kBlockStride rows apart.
constexpr int kMBlocks = 2, kBlockStride = 32, kFirstRow = 16, kFirstCol = 16;

template <typename Tile>
__device__ __forceinline__ void fill(Tile& tile, const typename Tile::Element* values) {
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols; i += 32) {
    *tile.pointer(i / Tile::kCols, i % Tile::kCols) = values[i];
  }
}

// Calls step(element of C, its index in a row-major matrix of 16 · kMBlocks rows).
template <int kN, typename Step>
__device__ __forceinline__ void for_each_element(Accumulator<kMBlocks, kN>& C, const Step& step) {
#pragma unroll
  for (int row = 0; row < C.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < C.kRowElements; ++i) {
      step(C.at(row, i),
           (row / 2 * 16 + fragment_row(row, threadIdx.x)) * kN + fragment_col(i, threadIdx.x));
    }
  }
}

template <typename TileA, typename TileB>
struct Operands {
  TileA a;
  TileB b;
};

template <Layout kLayoutA, Layout kLayoutB, int kN, int kK, typename TileA, typename TileB>
__global__ void __launch_bounds__(32)
    gemm_smem_kernel(const typename TileA::Element* a, const typename TileB::Element* b,
                     const float* c, float* sum, float* product) {
  using Element = typename TileA::Element;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<Operands<TileA, TileB>*>(dynamic_smem);
  fill(smem.a, a);
  fill(smem.b, b);
  __syncwarp();
  const int lane = threadIdx.x;
  const int first_m = kLayoutA == Layout::kKInner ? kFirstRow : 0;
  const SmemOperandA<kMBlocks, kBlockStride, kLayoutA, TileA> A(smem.a, first_m, lane);
  const SmemOperandB<TileB, kLayoutB> B(smem.b, kLayoutB == Layout::kKInner ? kFirstCol : 0, lane);
  Accumulator<kMBlocks, kN> C;
  for_each_element(C, [&](float& element, int index) { element = c[index]; });
  gemm_smem<Element, kK, Into::kSum>(C, A, B);
  for_each_element(C, [&](float& element, int index) { sum[index] = element; });
  gemm_smem<Element, kK, Into::kZero>(C, A, B);
  for_each_element(C, [&](float& element, int index) { product[index] = element; });
}

// c (2 · 16 × n) + A B by (m, k) and (k, n).
template <typename A, typename B>
std::vector<float> multiply(std::vector<float> c, int n, int k, const A& a, const B& b) {
  for (size_t i = 0; i < c.size(); ++i) {
    double sum = c[i];
    for (int j = 0; j < k; ++j) sum += double{a(i / n, j)} * b(j, i % n);
    c[i] = static_cast<float>(sum);
  }
  return c;
}

template <typename Element, Layout kLayoutA, Layout kLayoutB, int kSlabCols>
void test_gemm_smem(Random& random) {
  constexpr bool kRowsOfA = kLayoutA == Layout::kKInner, kRowsOfB = kLayoutB == Layout::kKInner;
  constexpr int kN = 48, kK = kIsWide<Element> ? 96 : 80, kCols = kSlabCols == 64 ? 128 : 96;
  using TileA = SmemTile<Element, kRowsOfA ? 80 : kK, kCols>;
  using TileB = SmemTile<Element, kRowsOfB ? kN + 32 : kK, kCols>;
  std::vector<Element> tile_a(TileA::kRows * kCols, poison<Element>());
  std::vector<Element> tile_b(TileB::kRows * kCols, poison<Element>());
  const auto a_index = [&](int m, int k) {
    const int mn = m / 16 * kBlockStride + m % 16;
    return kRowsOfA ? (kFirstRow + mn) * kCols + k : k * kCols + mn;
  };
  const auto b_index = [&](int k, int n) {
    return kRowsOfB ? (kFirstCol + n) * kCols + k : k * kCols + n;
  };
  const auto number = [&](int largest) {
    return rounded<Element>(static_cast<float>(random.integer(-largest, largest)));
  };
  // fp32: by turns one side has more digits than one TF32 number; sums stay below 2²⁴.
  constexpr int kMore = kIsWide<Element> ? 5000 : 100, kFew = kIsWide<Element> ? 30 : 100;
  for (int k = 0; k < kK; ++k) {
    for (int m = 0; m < kMBlocks * 16; ++m) {
      tile_a[a_index(m, k)] = number(k % 3 == 0 ? kMore : kFew);
    }
    for (int n = 0; n < kN; ++n) tile_b[b_index(k, n)] = number(k % 3 == 0 ? kFew : kMore);
  }
  const auto c = whole_numbers(random, kMBlocks * 16 * kN);
  DeviceArray<Element> device_a(tile_a), device_b(tile_b);
  DeviceArray<float> device_c(c), sum(c.size()), product(c.size());
  cuda::launch<gemm_smem_kernel<kLayoutA, kLayoutB, kN, kK, TileA, TileB>>(
      1, 32, sizeof(Operands<TileA, TileB>), nullptr, device_a.data(), device_b.data(),
      device_c.data(), sum.data(), product.data());
  const auto a = [&](int m, int k) { return static_cast<float>(tile_a[a_index(m, k)]); };
  const auto b = [&](int k, int n) { return static_cast<float>(tile_b[b_index(k, n)]); };
  expect_equal("C += A B", sum.read(), multiply(c, kN, kK, a, b));
  expect_equal("C = A B", product.read(), multiply(std::vector<float>(c.size()), kN, kK, a, b));
}

// An accumulator as the next product's left operand, and rounded into a tile.
template <int kN, int kK, typename TileB, typename TileC>
__global__ void __launch_bounds__(32)
    gemm_register_kernel(const float* a, const typename TileB::Element* b, float factor, float* sum,
                         typename TileC::Element* image) {
  using Element = typename TileB::Element;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<Operands<TileB, TileC>*>(dynamic_smem);
  fill(smem.a, b);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(smem.b)); i += 32) {
    reinterpret_cast<unsigned char*>(&smem.b)[i] = 0xff;
  }
  __syncwarp();
  Accumulator<kMBlocks, kK> unrounded;
  for_each_element(unrounded, [&](float& element, int index) { element = a[index]; });
  Accumulator<kMBlocks, kN> C;
  C.fill(1.f);
  gemm_register<Element>(C, to_operand_a<Element>(unrounded),
                         SmemOperandB<TileB, Layout::kKOuter>(smem.a, 0, threadIdx.x));
  for_each_element(C, [&](float& element, int index) { sum[index] = element; });
  store_rounded(smem.b, unrounded, kFirstRow, 0, threadIdx.x, factor);
  __syncwarp();
  for (int i = threadIdx.x; i < TileC::kRows * TileC::kCols; i += 32) {
    image[i] = *smem.b.pointer(i / TileC::kCols, i % TileC::kCols);
  }
}

template <typename Element, int kCols>
void test_gemm_register(Random& random) {
  constexpr int kN = 48, kK = kIsWide<Element> ? 48 : 80, kRows = 16 * kMBlocks;
  using TileB = SmemTile<Element, kK, kCols>;
  using TileC = SmemTile<Element, kFirstRow + kRows + 16, kCols>;
  const auto a = whole_numbers(random, kRows * kK), b = whole_numbers(random, kK * kCols);
  const float factor = 1.f / 3;
  std::vector<Element> tile_c(TileC::kRows * kCols, poison<Element>());
  for (int i = 0; i < kRows * kK; ++i) {
    tile_c[(kFirstRow + i / kK) * kCols + i % kK] = rounded<Element>(a[i] * factor);
  }
  DeviceArray<float> device_a(a), sum(kRows * kN);
  DeviceArray<Element> device_b(rounded<Element>(b)), image(tile_c.size());
  cuda::launch<gemm_register_kernel<kN, kK, TileB, TileC>>(
      1, 32, sizeof(Operands<TileB, TileC>), nullptr, device_a.data(), device_b.data(), factor,
      sum.data(), image.data());
  const auto expected = multiply(
      std::vector<float>(kRows * kN, 1.f), kN, kK, [&](int m, int k) { return a[m * kK + k]; },
      [&](int k, int n) { return b[k * kCols + n]; });
  expect_equal("C += A B", sum.read(), expected);
  expect_equal("the tile", image.read(), tile_c);
}

// Columns dealt out to warps: each writes its own of the product, between the others', to a tile.
constexpr int kWarps = 2;

template <int kN, int kK, typename TileA, typename TileB, typename TileC>
__global__ void __launch_bounds__(32 * kWarps)
    dealt_columns_kernel(const typename TileA::Element* a, const typename TileB::Element* b,
                         float factor, typename TileC::Element* image) {
  using Element = typename TileA::Element;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<Operands<Operands<TileA, TileB>, TileC>*>(dynamic_smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    fill(smem.a.a, a);
    fill(smem.a.b, b);
  }
  __syncthreads();
  Accumulator<kMBlocks, kN / kWarps> C;
  gemm_smem<Element, kK, Into::kZero>(
      C, SmemOperandA<kMBlocks, 16, Layout::kKInner, TileA>(smem.a.a, 0, lane),
      DealtColumns<kWarps, TileB>(smem.a.b, warp, lane));
  store_rounded<16 * kWarps>(smem.b, C, 0, warp * 16, lane, factor);
  __syncthreads();
  for (int i = threadIdx.x; i < TileC::kRows * TileC::kCols; i += 32 * kWarps) {
    image[i] = *smem.b.pointer(i / TileC::kCols, i % TileC::kCols);
  }
}

template <typename Element, int kN>
void test_dealt_columns(Random& random) {
  constexpr int kK = 32, kRows = 16 * kMBlocks;
  using TileA = SmemTile<Element, kRows, kK>;
  using TileB = SmemTile<Element, kK, kN>;
  using TileC = SmemTile<Element, kRows, kN>;
  const auto a = whole_numbers(random, kRows * kK), b = whole_numbers(random, kK * kN);
  const float factor = 1.f / 64;
  auto expected = multiply(
      std::vector<float>(kRows * kN), kN, kK, [&](int m, int k) { return a[m * kK + k]; },
      [&](int k, int n) { return b[k * kN + n]; });
  for (float& value : expected) value *= factor;
  DeviceArray<Element> device_a(rounded<Element>(a)), device_b(rounded<Element>(b));
  DeviceArray<Element> image(expected.size());
  cuda::launch<dealt_columns_kernel<kN, kK, TileA, TileB, TileC>>(
      1, 32 * kWarps, sizeof(Operands<Operands<TileA, TileB>, TileC>), nullptr, device_a.data(),
      device_b.data(), factor, image.data());
  expect_equal("the tile", image.read(), rounded<Element>(expected));
}

// image: the tile, whose elements from kFirstRow and the second slab on become those of the
// operand.
template <typename Tile, int kN>
__global__ void __launch_bounds__(32)
    store_operand_kernel(const float* values, const typename Tile::Element* before,
                         typename Tile::Element* image) {
  using Element = typename Tile::Element;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& tile = *reinterpret_cast<Tile*>(dynamic_smem);
  fill(tile, before);
  __syncwarp();
  Accumulator<kMBlocks, kN> C;
  for_each_element(C, [&](float& element, int index) { element = values[index]; });
  store_operand(tile, to_operand_a<Element>(C), kFirstRow, Tile::kSlabCols, threadIdx.x);
  __syncwarp();
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols; i += 32) {
    image[i] = *tile.pointer(i / Tile::kCols, i % Tile::kCols);
  }
}

template <typename Element, int kCols>
void test_store_operand(Random& random) {
  constexpr int kN = 32, kRows = 64;
  using Tile = SmemTile<Element, kRows, kCols>;
  const auto values = whole_numbers(random, 16 * kMBlocks * kN);
  const auto before = rounded<Element>(whole_numbers(random, kRows * kCols));
  auto expected = before;
  const auto rounded_values = rounded<Element>(values);
  for (int i = 0; i < 16 * kMBlocks * kN; ++i) {
    expected[(kFirstRow + i / kN) * kCols + Tile::kSlabCols + i % kN] = rounded_values[i];
  }
  DeviceArray<float> device(values);
  DeviceArray<Element> device_before(before), image(expected.size());
  cuda::launch<store_operand_kernel<Tile, kN>>(1, 32, sizeof(Tile), nullptr, device.data(),
                                               device_before.data(), image.data());
  expect_equal("the tile", image.read(), expected);
}

template <Layout kLayoutA, Layout kLayoutB>
void add_layouts(Tests& tests, const char* name) {
  tests.push_back(
      {test_name({name, "bf16-slab64"}), test_gemm_smem<__nv_bfloat16, kLayoutA, kLayoutB, 64>});
  tests.push_back(
      {test_name({name, "fp16-slab32"}), test_gemm_smem<__half, kLayoutA, kLayoutB, 32>});
  tests.push_back({test_name({name, "fp32"}), test_gemm_smem<float, kLayoutA, kLayoutB, 64>});
}

}  // namespace

void add_cuda_tile_tests(Tests& tests) {
  using Half = __half;
  using Bf16 = __nv_bfloat16;
  constexpr Layout kKInner = Layout::kKInner, kKOuter = Layout::kKOuter;
  tests.push_back({"cuda/tile_loader-64x128-bf16", test_tile_loader<Bf16, 64, 128>});
  tests.push_back({"cuda/tile_loader-96x96-fp16", test_tile_loader<Half, 96, 96>});
  tests.push_back({"cuda/tile_loader-32x64-fp32", test_tile_loader<float, 32, 64>});
  add_layouts<kKInner, kKInner>(tests, "cuda/gemm_smem-rows-rows");
  add_layouts<kKInner, kKOuter>(tests, "cuda/gemm_smem-rows-columns");
  add_layouts<kKOuter, kKInner>(tests, "cuda/gemm_smem-columns-rows");
  add_layouts<kKOuter, kKOuter>(tests, "cuda/gemm_smem-columns-columns");
  tests.push_back({"cuda/gemm_register-bf16-slab64", test_gemm_register<Bf16, 128>});
  tests.push_back({"cuda/gemm_register-fp16-slab32", test_gemm_register<Half, 96>});
  tests.push_back({"cuda/gemm_register-fp32", test_gemm_register<float, 64>});
  tests.push_back({"cuda/dealt_columns-bf16-slab64", test_dealt_columns<Bf16, 128>});
  tests.push_back({"cuda/dealt_columns-fp16-slab32", test_dealt_columns<Half, 96>});
  tests.push_back({"cuda/dealt_columns-fp32", test_dealt_columns<float, 128>});
  tests.push_back({"cuda/store_operand-bf16-slab64", test_store_operand<Bf16, 128>});
  tests.push_back({"cuda/store_operand-fp16-slab32", test_store_operand<Half, 96>});
}

}  // namespace flash_attn::tests
