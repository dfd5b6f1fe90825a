// sm90/tile/term_columns.cuh: columns of the operands of a product that stand for a term of the
// scores, by linear_term.cuh and by LSE and delta of the backward's queries
// (sm90/bwd_row_terms.cuh).
#include <algorithm>
#include <cmath>
#include <limits>

#include "../sm90/bwd_row_terms.cuh"
#include "../sm90/tile/linear_term.cuh"
#include "device_array.cuh"
#include "sm90_products.cuh"

namespace flash_attn::tests {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

template <typename Element, int kN>
struct LinearTermSmem {
  sm90::LinearTerm<Element, kN> term;
  sm90::TermColumns<Element, kN> behind;  // memcheck takes it to be read (TermColumns)
};

template <typename Element, int kN>
__global__ void __launch_bounds__(kThreads)
    linear_term_kernel(const float* c, float slope, float* sum) {
  using Term = sm90::LinearTerm<Element, kN>;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& term = reinterpret_cast<LinearTermSmem<Element, kN>*>(dynamic_smem)->term;
  term.init(threadIdx.x, kThreads);
  __syncthreads();
  typename Term::Slope operand = Term::operand_of(slope, threadIdx.x % 32);
  Accumulator<1, kN> C;
  load(C, c);
  sm90::pin(C);
  sm90::pin(operand);
  sm90::ptx::wgmma_fence();
  term.start(C, operand);
  finish(C, sum);
}

template <int kN>
struct RowTermsSmem {
  using Columns = sm90::RowColumns<__nv_bfloat16, kN, /*kHoldsOnes=*/true>;
  using Terms = sm90::RowTerms<Columns, Columns>;
  Terms terms;
  sm90::BehindRows<Terms> behind;
};

// What a block of kN queries adds to the products c: s - LSE / softmax_scale and dp - delta.
template <int kN>
__global__ void __launch_bounds__(kThreads)
    row_terms_kernel(const float* c, const float* lse_log2, const float* delta, float softmax_scale,
                     float* s, float* dp, float* scale_log2) {
  using Terms = typename RowTermsSmem<kN>::Terms;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<RowTermsSmem<kN>*>(dynamic_smem);
  const float scale = Terms::scale_log2(softmax_scale);
  if (threadIdx.x < kN) {
    smem.terms.write(threadIdx.x, lse_log2[threadIdx.x], delta[threadIdx.x], scale);
  }
  smem.terms.publish();
  __syncthreads();
  const auto ones = RowTermsSmem<kN>::Columns::ones();
  Accumulator<1, kN> C;
  load(C, c);
  sm90::pin(C);
  sm90::ptx::wgmma_fence();
  smem.terms.lse.subtract_from(C, ones);
  finish(C, s);
  load(C, c);
  sm90::pin(C);
  sm90::ptx::wgmma_fence();
  smem.terms.delta.subtract_from(C, ones);
  finish(C, dp);
  if (threadIdx.x == 0) *scale_log2 = scale;
}

// Slopes of as few bits as leave the sums exact: two of the three numbers.
template <typename Element, int kN>
void test_linear_term(Random& random) {
  for (const float slope : {64.f, -3.f, 0.f, 0x3ABDp-12f, -0x2AABp-13f}) {
    const auto c = whole_numbers(random, kRows * kN);
    DeviceArray<float> device_c(c), sum(c.size());
    run(linear_term_kernel<Element, kN>, sizeof(LinearTermSmem<Element, kN>), device_c.data(),
        slope, sum.data());
    std::vector<float> expected = c;
    for (int i = 0; i < kN / 2; ++i) {
      for (int thread = 0; thread < kThreads; ++thread) {
        const int col = accumulator_place(i, thread).col;
        expected[i * kThreads + thread] += slope * static_cast<float>(col);
      }
    }
    expect_equal("C += slope · column", sum.read(), expected);
  }
}

// c - the number of the column. The number is added as three, twice each, and the tensor cores cut
// off what they keep no bits for beside the largest: seen on a GPU are errors of 0.85 · 2^-22 of
// it. Two numbers of bf16 would leave 2^-17.
template <int kN>
void expect_subtracted(const char* what, const std::vector<float>& actual,
                       const std::vector<float>& c, const std::vector<double>& numbers) {
  size_t first = 0, wrong = 0;
  float expected_there = 0;
  for (size_t i = c.size(); i-- > 0;) {
    const double number = numbers[accumulator_place(i / kThreads, i % kThreads).col];
    const double expected = c[i] - number;
    const double allowed = 0x1p-22 * (std::abs(c[i]) + std::abs(number));
    if (std::abs(actual[i] - expected) <= allowed) continue;  // not so if it is NaN
    first = i;
    ++wrong;
    expected_there = static_cast<float>(expected);
  }
  if (wrong > 0) fail(what, wrong, c.size(), first, actual[first], expected_there);
}

// lse_size: LSE's deviation. Some rows have what no other has: nothing to attend to, more than can
// be divided, as much as a row with a gradient may have.
template <int kN>
void test_row_terms(Random& random, float softmax_scale, float lse_size) {
  constexpr float kLargestLse = 6.1e6f;  // 2^22 in base 2
  constexpr double kSmallestScale = 1e-35f, kLargestNumber = 1e38f;
  const auto c = normal_numbers(random, kRows * kN);
  auto lse = normal_numbers(random, kN), delta = normal_numbers(random, kN);
  for (float& x : lse) x *= lse_size;
  const std::vector<float> unlike = {kInf, -kInf, 3e38f, -3e38f, kLargestLse, -kLargestLse, 0.f};
  for (size_t i = 0; i < unlike.size(); ++i) lse[5 * i + 3] = unlike[i];
  delta[1] = 0.f, delta[8] = 1e30f, delta[9] = -3e4f, delta[kN - 1] = 0x1.fffffep-3f;
  DeviceArray<float> device_c(c), device_lse(lse), device_delta(delta), s(c.size()), dp(c.size()),
      scale(1);
  run(row_terms_kernel<kN>, sizeof(RowTermsSmem<kN>), device_c.data(), device_lse.data(),
      device_delta.data(), softmax_scale, s.data(), dp.data(), scale.data());

  const float scaled = softmax_scale * kLog2E;
  const float scale_log2 = scale.read()[0];
  expect_equal<float>("scale_log2", {scale_log2}, {scaled > kSmallestScale ? scaled : 1e-35f});
  std::vector<double> in_scores(kN);
  for (int row = 0; row < kN; ++row) {
    const double quotient = static_cast<double>(lse[row]) / scale_log2;
    in_scores[row] = std::min(std::max(quotient, -kLargestNumber), kLargestNumber);
  }
  expect_subtracted<kN>("S - LSE / softmax_scale", s.read(), c, in_scores);
  expect_subtracted<kN>("dP - delta", dp.read(), c, {delta.begin(), delta.end()});
}

template <typename Element, int kN>
void add_linear_term(Tests& tests) {
  tests.push_back({test_name({"sm90/linear_term", std::to_string(kN), kNameOf<Element>}),
                   test_linear_term<Element, kN>});
}

template <int kN>
void add_row_terms(Tests& tests) {
  const auto add = [&](const char* what, float softmax_scale, float lse_size) {
    tests.push_back({test_name({"sm90/row_terms", std::to_string(kN), what}),
                     [=](Random& random) { test_row_terms<kN>(random, softmax_scale, lse_size); }});
  };
  add("plain", 0.125f, 10.f);
  add("large", 0.125f, 1e5f);
  add("steep", 1e20f, 10.f);
  add("near_zero", 1e-29f, 10.f);
  add("below_the_smallest", 1e-37f, 1e5f);
  add("zero", 0.f, 10.f);
  add("negative", -0.125f, 10.f);
}

}  // namespace

void add_sm90_terms_tests(Tests& tests) {
  add_linear_term<__nv_bfloat16, 128>(tests);
  add_linear_term<__half, 128>(tests);
  add_linear_term<__nv_bfloat16, 96>(tests);
  add_linear_term<__half, 96>(tests);
  add_row_terms<64>(tests);
  add_row_terms<128>(tests);
}

}  // namespace flash_attn::tests
