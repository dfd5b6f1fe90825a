// Under torch.autocast q, k, v and a floating bias are cast to the autocast dtype, as
// scaled_dot_product_attention does.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "checks.h"

namespace flash_attn {
namespace {

template <at::DeviceType kDevice, c10::DispatchKey kKey>
FwdResult fwd_autocast(const FwdArgs& outer) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(kKey);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, kDevice);
  };
  FwdArgs args = outer;
  args.attn.q = cast(args.attn.q);
  args.attn.k = cast(args.attn.k);
  args.attn.v = cast(args.attn.v);
  if (args.attn.attn_bias) args.attn.attn_bias = cast(*args.attn.attn_bias);
  return call_fwd(std::move(args));
}

// The cache stays as it is, so the queries follow its dtype: a cast would copy it on every step.
// 8 bits are no dtype for them.
template <at::DeviceType kDevice>
at::ScalarType query_dtype(const DecodeArgs& args) {
  return is_quantized(args.k_cache) ? at::autocast::get_autocast_dtype(kDevice)
                                    : args.k_cache.scalar_type();
}

template <at::DeviceType kDevice, c10::DispatchKey kKey>
DecodeResult decode_autocast(const DecodeArgs& outer) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(kKey);
  DecodeArgs args = outer;
  args.q = args.q.to(query_dtype<kDevice>(args));
  return call_decode(std::move(args));
}

template <at::DeviceType kDevice, c10::DispatchKey kKey>
DecodeResult kvcache_autocast(const KvcacheArgs& outer) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(kKey);
  KvcacheArgs args = outer;
  const at::ScalarType dtype = query_dtype<kDevice>(args.decode);
  for (at::Tensor* tensor : {&args.decode.q, &args.k, &args.v}) *tensor = tensor->to(dtype);
  for (OptTensor* table : {&args.rotary_cos, &args.rotary_sin}) {
    if (*table) *table = (*table)->to(dtype);
  }
  return call_kvcache(std::move(args));
}

}  // namespace
}  // namespace flash_attn

TORCH_LIBRARY_IMPL(flash_attn, AutocastCPU, library) {
  using namespace flash_attn;
  library.impl("fwd",
               TORCH_FN((&Fwd::from_list<&fwd_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>>)));
  library.impl(
      "decode",
      TORCH_FN((&Decode::from_list<&decode_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>>)));
  library.impl(
      "kvcache",
      TORCH_FN((&Kvcache::from_list<&kvcache_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>>)));
}

TORCH_LIBRARY_IMPL(flash_attn, AutocastCUDA, library) {
  using namespace flash_attn;
  library.impl(
      "fwd", TORCH_FN((&Fwd::from_list<&fwd_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>>)));
  library.impl(
      "decode",
      TORCH_FN((&Decode::from_list<&decode_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>>)));
  library.impl(
      "kvcache",
      TORCH_FN(
          (&Kvcache::from_list<&kvcache_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>>)));
}
