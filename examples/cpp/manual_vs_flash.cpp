// Manual attention (matmul, mask, softmax, matmul) against flash_attn, forward and backward, from
// C++.
//
//   manual_vs_flash [cpu|cuda]     exit code 0: they agree; 1: they do not; 77: no such device
#include <flash_attn/flash_attn.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>

namespace {

using at::Tensor;

// softmax(Q Kᵀ / √d, lower triangle) V with the whole (seqlen, seqlen) matrix in memory. (batch,
// seqlen, heads, d).
Tensor manual_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  const Tensor Q = q.transpose(1, 2), K = k.transpose(1, 2), V = v.transpose(1, 2);
  const Tensor S =
      torch::matmul(Q, K.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(-1)));
  const Tensor future =
      torch::ones({q.size(1), k.size(1)}, q.options().dtype(torch::kBool)).triu(1);
  const Tensor P =
      torch::softmax(S.masked_fill(future, -std::numeric_limits<double>::infinity()), -1);
  return torch::matmul(P, V).transpose(1, 2);
}

// The largest difference over the largest value of the reference.
double error(const Tensor& result, const Tensor& reference) {
  return ((result.to(torch::kDouble) - reference).abs().max() / reference.abs().max())
      .item<double>();
}

bool agrees(const char* what, const Tensor& result, const Tensor& reference, double limit) {
  const double found = error(result, reference);
  std::printf("  %-4s error %.1e (limit %.1e)%s\n", what, found, limit,
              found <= limit ? "" : "  TOO LARGE");
  return found <= limit;
}

bool compare(torch::Device device, torch::ScalarType dtype, double limit) {
  std::printf("%s, %s\n", device.str().c_str(), c10::toString(dtype));
  torch::manual_seed(0);
  const auto random = [&] {
    return torch::randn({2, 200, 4, 64}, torch::dtype(torch::kDouble))
        .to(device, dtype)
        .requires_grad_();
  };
  const Tensor q = random(), k = random(), v = random(), dout = random().detach();

  const auto [out, lse] = flash_attn::flash_attn_func(q, k, v, {.causal = true});
  const auto grads = torch::autograd::grad({out}, {q, k, v}, {dout});

  const auto exact = [](const Tensor& t) { return t.detach().to(torch::kDouble).requires_grad_(); };
  const Tensor q64 = exact(q), k64 = exact(k), v64 = exact(v);
  const Tensor reference = manual_attention(q64, k64, v64);
  const auto reference_grads =
      torch::autograd::grad({reference}, {q64, k64, v64}, {dout.to(torch::kDouble)});

  bool ok = agrees("out", out, reference, limit);
  ok &= agrees("dq", grads[0], reference_grads[0], limit);
  ok &= agrees("dk", grads[1], reference_grads[1], limit);
  ok &= agrees("dv", grads[2], reference_grads[2], limit);
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  const torch::Device device(argc > 1 ? argv[1] : "cpu");
  if (device.is_cuda() && !torch::cuda::is_available()) {
    std::printf("no CUDA device\n");
    return 77;
  }
  bool ok = compare(device, torch::kFloat, 1e-5);
  ok &= compare(device, torch::kBFloat16, 2e-2);
  std::printf(ok ? "agree\n" : "DISAGREE\n");
  return ok ? 0 : 1;
}
