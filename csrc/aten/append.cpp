// New keys and values into a cache, in place: rotate, quantise, write. Without a host
// synchronisation, and so for every device and inside CUDA graphs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <limits>

#include "aten/attention.h"
#include "aten/cache.h"
#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

namespace {

// x (batch, n, heads, d) with the first dimensions of each head rotated (Su et al. 2021) by the
// angles of its positions, int64 (batch, n or 1): in the dtype computed in.
//   x₁' = x₁ cos − x₂ sin        x₂' = x₁ sin + x₂ cos
Tensor rotate(const Tensor& x, const NewTokens& tokens, const Tensor& positions) {
  const at::ScalarType dtype = compute_dtype(x);
  const int64_t half = tokens.rotary_cos->size(1);
  const Tensor row = positions.clamp(0, tokens.rotary_cos->size(0) - 1);
  const auto at_rows = [&](const Tensor& table) {
    return at::index(table, {row}).unsqueeze(2).to(dtype);
  };
  const Tensor cos = at_rows(*tokens.rotary_cos), sin = at_rows(*tokens.rotary_sin);

  const Tensor turned = x.narrow(-1, 0, 2 * half).to(dtype);
  const bool interleaved = tokens.rotary_interleaved;
  const Tensor pairs =
      interleaved ? turned.unflatten(-1, {half, 2}) : turned.unflatten(-1, {2, half});
  const int64_t side = interleaved ? -1 : -2;
  const Tensor x1 = pairs.select(side, 0), x2 = pairs.select(side, 1);
  const Tensor rotated = at::stack({x1 * cos - x2 * sin, x1 * sin + x2 * cos}, side).flatten(-2);
  return at::cat({rotated, x.narrow(-1, 2 * half, x.size(-1) - 2 * half).to(dtype)}, -1);
}

// What a cache stores for x (batch, n, heads, d): rounded to nearest even; 8 bits: divided by
// descale and saturated.
Tensor stored(const Tensor& x, at::ScalarType dtype, const std::optional<Tensor>& descale) {
  if (dtype != at::kChar && dtype != at::kFloat8_e4m3fn) return x.to(dtype);
  Tensor scaled = x.to(compute_dtype(x));
  if (descale) {
    const Block batches = {0, x.size(0)}, heads = {0, x.size(2)};
    scaled =
        scaled / descale_factors(*descale, batches, heads, scaled.scalar_type()).transpose(1, 2);
  }
  if (dtype == at::kFloat8_e4m3fn) return scaled.clamp(-448, 448).to(dtype);
  return scaled.nan_to_num(0.0).round_().clamp_(-128, 127).to(dtype);  // NaN has no int8: 0
}

// Writes x (batch, n, heads, d) to those of the places, (batch · n), that exist. Their number must
// not depend on them, so what has no place repeats the write of the first that has one, or writes
// back what is there if none has.
void store(const Tensor& cache, const Tensor& x, const Cache::Places& places) {
  const Tensor bytes = as_bytes(cache), values = as_bytes(x).flatten(0, 1);
  const Tensor exists = places.exists.flatten();
  const Tensor token = at::arange(exists.size(0), places.page.options());
  const Tensor source = at::where(exists, token, exists.to(at::kInt).argmax());
  const auto from = [&](const Tensor& all) { return all.flatten(0, 1).index_select(0, source); };
  const Tensor page = from(places.page), slot = from(places.slot);
  const Tensor kept = at::index(bytes, {page, slot});
  const Tensor written = at::where(exists.any(), values.index_select(0, source), kept);
  Tensor target = bytes;
  target.index_put_({page, slot}, written);
}

}  // namespace

Appended append(const DecodeArgs& args, const NewTokens& tokens) {
  const Cache cache(args);
  const int64_t count = tokens.k.size(1);
  const auto int64 = args.q.options().dtype(at::kLong);
  const Tensor start =
      args.cache_seqlens ? args.cache_seqlens->to(at::kLong) : cache.lengths() - count;
  const Tensor first = start.unsqueeze(-1);
  const Tensor position = first + at::arange(count, int64);

  Tensor q = args.q, k = tokens.k;
  if (tokens.rotary_cos && tokens.rotary_cos->size(0) > 0) {
    k = rotate(k, tokens, position);
    // Where no mask tells the queries apart they all stand at the first new position.
    const bool ordered = args.window_left >= 0 || args.window_right >= 0;
    q = rotate(q, tokens, ordered ? first + at::arange(q.size(1), int64) : first)
            .to(q.scalar_type());
  }
  if (tokens.k.size(0) * count > 0 && cache.capacity() > 0) {
    const Cache::Places places = cache.places({0, tokens.k.size(0)}, position);
    store(args.k_cache, stored(k, args.k_cache.scalar_type(), args.k_descale), places);
    store(args.v_cache, stored(tokens.v, args.v_cache.scalar_type(), args.v_descale), places);
  }
  return {q, (start + count).clamp(0, cache.capacity()).to(at::kInt)};
}

}  // namespace flash_attn::aten
