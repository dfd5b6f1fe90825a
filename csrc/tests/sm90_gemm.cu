// sm90/tile/gemm.cuh: every shape of wgmma that is compiled, from slabs of both widths.
#include "../sm90/tile/gemm.cuh"

#include "../sm90/ptx/fence.cuh"
#include "device_array.cuh"
#include "sm90_products.cuh"

namespace flash_attn::tests {
namespace {

using sm90::WgmmaOperand;

// By all threads; values: kRows × kCols of the tile.
template <typename Tile>
__device__ __forceinline__ void fill(Tile& tile, const typename Tile::Element* values) {
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols; i += kThreads) {
    *tile.pointer(i / Tile::kCols, i % Tile::kCols) = values[i];
  }
}

template <typename TileA, typename TileB>
struct Operands {
  alignas(1024) TileA a;
  alignas(1024) TileB b;
};

// Both operands in the same layout, from first_m and first_n of their tiles on.
template <int kN, int kK, Layout kLayout, typename TileA, typename TileB>
__global__ void __launch_bounds__(kThreads)
    gemm_ss_kernel(const typename TileA::Element* a, const typename TileB::Element* b,
                   const float* c, float* sum, float* product, int first_m, int first_n) {
  using Element = typename TileA::Element;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<Operands<TileA, TileB>*>(dynamic_smem);
  fill(smem.a, a);
  fill(smem.b, b);
  sm90::ptx::fence_async_shared();
  __syncthreads();

  const WgmmaOperand<kLayout, TileA> A(smem.a, first_m);
  const WgmmaOperand<kLayout, TileB> B(smem.b, first_n);
  Accumulator<1, kN> C;
  load(C, c);
  sm90::gemm_ss<Element, kK, Into::kSum>(C, A, B);
  finish(C, sum);
  sm90::gemm_ss<Element, kK, Into::kZero>(C, A, B);
  finish(C, product);
}

template <int kN, int kK, typename TileB>
__global__ void __launch_bounds__(kThreads)
    gemm_rs_kernel(const uint32_t* a, const typename TileB::Element* b, const float* c, float* sum,
                   int first_n) {
  using Element = typename TileB::Element;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<TileB*>(dynamic_smem);
  fill(smem, b);
  sm90::ptx::fence_async_shared();
  __syncthreads();

  OperandA<1, kK> A;
#pragma unroll
  for (int i = 0; i < kK / 4; ++i) A.data[0][i / 4][i % 4] = a[i * kThreads + threadIdx.x];
  Accumulator<1, kN> C;
  load(C, c);
  sm90::gemm_rs<Element>(C, A, WgmmaOperand<Layout::kKOuter, TileB>(smem, first_n));
  finish(C, sum);
}

// B's rows are n, from first_n on.
template <int kN, int kK, typename TileB>
__global__ void __launch_bounds__(kThreads)
    gemm_rs_inner_kernel(const uint32_t* a, const typename TileB::Element* b, const float* c,
                         float* sum, float* product, int first_n) {
  using Element = typename TileB::Element;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<TileB*>(dynamic_smem);
  fill(smem, b);
  sm90::ptx::fence_async_shared();
  __syncthreads();

  OperandA<1, kK> A;
#pragma unroll
  for (int i = 0; i < kK / 4; ++i) A.data[0][i / 4][i % 4] = a[i * kThreads + threadIdx.x];
  const WgmmaOperand<Layout::kKInner, TileB> B(smem, first_n);
  Accumulator<1, kN> C;
  load(C, c);
  sm90::gemm_rs<Element, Into::kSum>(C, A, B);
  finish(C, sum);
  sm90::gemm_rs<Element, Into::kZero>(C, A, B);
  finish(C, product);
}

// What lies in a tile of tile_rows × tile_cols: `values`, rows of `cols`, from first_row and
// first_col on, poison around them.
template <typename Element>
std::vector<Element> tile_image(const std::vector<float>& values, int cols, int first_row,
                                int tile_rows, int tile_cols, int first_col = 0) {
  std::vector<Element> image(tile_rows * tile_cols, poison<Element>());
  for (size_t i = 0; i < values.size(); ++i) {
    image[(first_row + i / cols) * tile_cols + first_col + i % cols] = rounded<Element>(values[i]);
  }
  return image;
}

std::vector<float> transposed(const std::vector<float>& values, int cols) {
  const int rows = values.size() / cols;
  std::vector<float> result(values.size());
  for (int i = 0; i < rows * cols; ++i) result[i % cols * rows + i / cols] = values[i];
  return result;
}

// As accumulator_place(), of the first of the two elements of an A register: columns 8 … 15 of a
// block of 16 come after both rows of the first 8.
Place operand_a_place(int i, int thread) {
  const int lane = thread % 32;
  return {thread / 32 * 16 + i % 2 * 8 + lane / 4, i / 4 * 16 + i / 2 % 2 * 8 + lane % 4 * 2};
}

// A (kRows × k) as registers of a left operand.
template <typename Element>
std::vector<uint32_t> operand_registers(const std::vector<float>& A, int k) {
  std::vector<uint32_t> registers(k / 4 * kThreads);
  for (int i = 0; i < k / 4; ++i) {
    for (int thread = 0; thread < kThreads; ++thread) {
      const auto [row, col] = operand_a_place(i, thread);
      const Element pair[2] = {rounded<Element>(A[row * k + col]),
                               rounded<Element>(A[row * k + col + 1])};
      std::memcpy(&registers[i * kThreads + thread], pair, sizeof(pair));
    }
  }
  return registers;
}

// c + A B in the order of registers, A (kRows × k), B (k × n).
std::vector<float> multiply(std::vector<float> c, const std::vector<float>& A,
                            const std::vector<float>& B, int n, int k) {
  for (int i = 0; i < n / 2; ++i) {
    for (int thread = 0; thread < kThreads; ++thread) {
      const auto [row, col] = accumulator_place(i, thread);
      double sum = c[i * kThreads + thread];
      for (int j = 0; j < k; ++j) sum += static_cast<double>(A[row * k + j]) * B[j * n + col];
      c[i * kThreads + thread] = static_cast<float>(sum);
    }
  }
  return c;
}

// C of n columns, sums over k. cols: of tiles with k in their columns; else of a slab.
struct Shape {
  int n, k, cols;

  constexpr int slab() const { return cols % 64 == 0 ? 64 : 32; }
  // Of a tile with room for mn columns from the second slab on.
  constexpr int outer_cols(int mn) const {
    const int least = slab() + mn;
    return slab() == 64 ? (least + 63) / 64 * 64 : (least + 31) / 64 * 64 + 32;
  }
  constexpr int rows_a() const { return kRows + 80; }
  constexpr int rows_b() const { return n + 16; }
};

template <typename Element>
using GemmSs = void (*)(const Element* a, const Element* b, const float* c, float* sum,
                        float* product, int first_m, int first_n);

template <typename Element>
void test_gemm_ss(Random& random, const Shape& shape, GemmSs<Element> kernel, int smem_bytes) {
  const int n = shape.n, k = shape.k, rows_b = shape.rows_b();
  constexpr int kFirstRows[][2] = {{0, 0}, {64, 0}, {8, 16}, {80, 8}};
  for (const auto& [row_a, row_b] : kFirstRows) {
    const auto a = whole_numbers(random, kRows * k), b = whole_numbers(random, n * k);
    const auto c = whole_numbers(random, kRows * n);
    DeviceArray<Element> tile_a(tile_image<Element>(a, k, row_a, shape.rows_a(), shape.cols));
    DeviceArray<Element> tile_b(tile_image<Element>(b, k, row_b, rows_b, shape.cols));
    DeviceArray<float> device_c(c), sum(c.size()), product(c.size());
    run(kernel, smem_bytes, tile_a.data(), tile_b.data(), device_c.data(), sum.data(),
        product.data(), row_a, row_b);
    const auto B = transposed(b, k);
    expect_equal("C += A B", sum.read(), multiply(c, a, B, n, k));
    const std::vector<float> zeros(c.size());
    expect_equal("C = A B", product.read(), multiply(zeros, a, B, n, k));
  }
}

// The same with k in the rows of both tiles, whose columns m and n start at a slab.
template <typename Element>
void test_gemm_ss_outer(Random& random, const Shape& shape, GemmSs<Element> kernel,
                        int smem_bytes) {
  const int n = shape.n, k = shape.k, slab = shape.slab();
  for (const int first_m : {0, slab}) {
    const int first_n = slab - first_m;
    const auto a = whole_numbers(random, kRows * k), b = whole_numbers(random, k * n);
    const auto c = whole_numbers(random, kRows * n);
    DeviceArray<Element> tile_a(
        tile_image<Element>(transposed(a, k), kRows, 0, k, shape.outer_cols(kRows), first_m));
    DeviceArray<Element> tile_b(tile_image<Element>(b, n, 0, k, shape.outer_cols(n), first_n));
    DeviceArray<float> device_c(c), sum(c.size()), product(c.size());
    run(kernel, smem_bytes, tile_a.data(), tile_b.data(), device_c.data(), sum.data(),
        product.data(), first_m, first_n);
    expect_equal("C += A B", sum.read(), multiply(c, a, b, n, k));
    const std::vector<float> zeros(c.size());
    expect_equal("C = A B", product.read(), multiply(zeros, a, b, n, k));
  }
}

template <typename Element>
using GemmRs = void (*)(const uint32_t* a, const Element* b, const float* c, float* sum,
                        int first_n);

template <typename Element>
void test_gemm_rs(Random& random, const Shape& shape, GemmRs<Element> kernel, int smem_bytes) {
  const int n = shape.n, k = shape.k;
  for (const int first_n : {0, shape.slab()}) {
    const auto a = whole_numbers(random, kRows * k), b = whole_numbers(random, k * n);
    const auto c = whole_numbers(random, kRows * n);
    DeviceArray<uint32_t> registers(operand_registers<Element>(a, k));
    DeviceArray<Element> tile_b(tile_image<Element>(b, n, 0, k, shape.outer_cols(n), first_n));
    DeviceArray<float> device_c(c), sum(c.size());
    run(kernel, smem_bytes, registers.data(), tile_b.data(), device_c.data(), sum.data(), first_n);
    expect_equal("C += A B", sum.read(), multiply(c, a, b, n, k));
  }
}

template <typename Element>
using GemmRsInner = void (*)(const uint32_t* a, const Element* b, const float* c, float* sum,
                             float* product, int first_n);

template <typename Element>
void test_gemm_rs_inner(Random& random, const Shape& shape, GemmRsInner<Element> kernel,
                        int smem_bytes) {
  const int n = shape.n, k = shape.k;
  for (const int first_n : {0, 8, 16}) {
    const auto a = whole_numbers(random, kRows * k), b = whole_numbers(random, n * k);
    const auto c = whole_numbers(random, kRows * n);
    DeviceArray<uint32_t> registers(operand_registers<Element>(a, k));
    DeviceArray<Element> tile_b(tile_image<Element>(b, k, first_n, shape.rows_b(), shape.cols));
    DeviceArray<float> device_c(c), sum(c.size()), product(c.size());
    run(kernel, smem_bytes, registers.data(), tile_b.data(), device_c.data(), sum.data(),
        product.data(), first_n);
    const auto B = transposed(b, k);
    expect_equal("C += A B", sum.read(), multiply(c, a, B, n, k));
    const std::vector<float> zeros(c.size());
    expect_equal("C = A B", product.read(), multiply(zeros, a, B, n, k));
  }
}

// The test functions are few, as host code costs more time to compile than kernels.
template <typename Element, typename Kernel>
void add(Tests& tests, void (*test)(Random&, const Shape&, Kernel, int), const char* what,
         const Shape& shape, Kernel kernel, int smem_bytes) {
  const char* slab = shape.cols % 64 == 0 ? "slab64" : "slab32";
  tests.push_back({test_name({what, std::to_string(shape.n), kNameOf<Element>, slab}),
                   [=](Random& random) { test(random, shape, kernel, smem_bytes); }});
}

template <typename Element, int kN, int kCols, int kK>
void add_ss(Tests& tests) {
  constexpr Shape kShape = {.n = kN, .k = kK, .cols = kCols};
  using TileA = SmemTile<Element, kShape.rows_a(), kCols>;
  using TileB = SmemTile<Element, kShape.rows_b(), kCols>;
  add<Element, GemmSs<Element>>(tests, test_gemm_ss<Element>, "sm90/gemm_ss", kShape,
                                gemm_ss_kernel<kN, kK, Layout::kKInner, TileA, TileB>,
                                sizeof(Operands<TileA, TileB>));
}

template <typename Element, int kN, int kCols, int kK>
void add_ss_outer(Tests& tests) {
  constexpr Shape kShape = {.n = kN, .k = kK, .cols = kCols};
  using TileA = SmemTile<Element, kK, kShape.outer_cols(kRows)>;
  using TileB = SmemTile<Element, kK, kShape.outer_cols(kN)>;
  add<Element, GemmSs<Element>>(tests, test_gemm_ss_outer<Element>, "sm90/gemm_ss_outer", kShape,
                                gemm_ss_kernel<kN, kK, Layout::kKOuter, TileA, TileB>,
                                sizeof(Operands<TileA, TileB>));
}

template <typename Element, int kN, int kCols, int kK>
void add_rs(Tests& tests) {
  constexpr Shape kShape = {.n = kN, .k = kK, .cols = kCols};
  using TileB = SmemTile<Element, kK, kShape.outer_cols(kN)>;
  add<Element, GemmRs<Element>>(tests, test_gemm_rs<Element>, "sm90/gemm_rs", kShape,
                                gemm_rs_kernel<kN, kK, TileB>, sizeof(TileB));
}

template <typename Element, int kN, int kCols, int kK>
void add_rs_inner(Tests& tests) {
  constexpr Shape kShape = {.n = kN, .k = kK, .cols = kCols};
  using TileB = SmemTile<Element, kShape.rows_b(), kCols>;
  add<Element, GemmRsInner<Element>>(tests, test_gemm_rs_inner<Element>, "sm90/gemm_rs_inner",
                                     kShape, gemm_rs_inner_kernel<kN, kK, TileB>, sizeof(TileB));
}

// The width of the slabs matters to descriptors, the type to the instruction: one type meets both
// widths. k ends inside a slab that is not the first.
template <int kN>
void add_shape(Tests& tests) {
  using Half = __half;
  using Bf16 = __nv_bfloat16;
  add_ss<Bf16, kN, 128, 80>(tests);
  add_ss<Bf16, kN, 96, 48>(tests);
  add_ss<Half, kN, 128, 80>(tests);
  add_rs<Bf16, kN, 64, 48>(tests);
  add_rs<Bf16, kN, 32, 48>(tests);
  add_rs<Half, kN, 32, 48>(tests);
}

template <int... kNs>
void add_shapes(Tests& tests) {
  (add_shape<kNs>(tests), ...);
}

}  // namespace

void add_sm90_gemm_tests(Tests& tests) {
  add_shapes<32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256>(tests);
  add_ss_outer<__nv_bfloat16, 64, 64, 128>(tests);
  add_ss_outer<__nv_bfloat16, 96, 32, 48>(tests);
  add_ss_outer<__nv_bfloat16, 40, 32, 128>(tests);
  add_ss_outer<__half, 128, 64, 80>(tests);
  add_rs_inner<__nv_bfloat16, 64, 96, 96>(tests);
  add_rs_inner<__half, 64, 64, 64>(tests);
}

}  // namespace flash_attn::tests
