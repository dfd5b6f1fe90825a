#include "aten/slice.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include <algorithm>

#include "aten/gpu_tiles.h"
#include "aten/parallel.h"
#include "aten/tile.h"
#include "core/call.h"
#include "core/score_range.h"

namespace flash_attn::aten {

using at::Tensor;

namespace {

// 256 · 512 fp32 scores with the K and V rows that they need fit the second-level cache of one core
// (1 MB). Elsewhere one operation covers a tile of every head, and a tile has to be large enough to
// pay for its launches. On a GPU it has as many rows as leave a tile of all heads so many scores,
// whatever the call.
struct TileShape {
  int64_t rows, keys;
};
constexpr int64_t kGpuTileScores = 1 << 25;
constexpr TileShape kCpuTile = {256, 512};
// A tile's numbers are its scores, Q, K, V and O. So many of fp32 fit the cache. A sequence with no
// more than kOneCoreNumbers in all its heads is one task: sharing it among cores costs more than it
// gains.
constexpr int64_t kCpuTileNumbers = 1 << 18, kOneCoreNumbers = 1 << 16;

TileShape tile_shape(const Slice& slice) {
  if (slice.on_gpu) return {0, cuda::kScoreTileKeys};
  return host_reads(slice.q) ? kCpuTile : TileShape{512, 1024};
}

int64_t rows_per_block(const Slice& slice) {
  if (slice.on_gpu) {
    constexpr int64_t kMultiple = 16;
    const int64_t keys = slice.k.defined()
                             ? std::min<int64_t>(slice.seqlen_k(), cuda::kScoreTileKeys)
                             : cuda::kScoreTileKeys;
    const int64_t a_row = slice.batches.size() * slice.heads.size() * std::max<int64_t>(keys, 1);
    const int64_t rows = std::max<int64_t>(kGpuTileScores / a_row / kMultiple, 1) * kMultiple;
    const Band& band = slice.terms.band;
    if (!band.limited()) return rows;
    // In four blocks of rows a causal call has three eighths of its scores less, and of a window's
    // scores no more than half are hidden in blocks as long as it.
    constexpr int64_t kLeastBandRows = 128;
    const int64_t wanted = std::min(ceil_div(slice.seqlen_q(), 4), band.left + band.right);
    return std::min(rows, std::max(ceil_div(wanted, kMultiple) * kMultiple, kLeastBandRows));
  }
  const int64_t heads_in_tile = slice.heads.size() / slice.kv_heads.size();
  return std::max<int64_t>(tile_shape(slice).rows / heads_in_tile, 1);
}

}  // namespace

int64_t Slice::count_row_blocks() const { return ceil_div(seqlen_q(), rows_per_block(*this)); }

Block Slice::row_block(int64_t index) const {
  const int64_t step = rows_per_block(*this);
  return Block{index * step, (index + 1) * step} & Block{0, seqlen_q()};
}

int64_t Slice::count_key_blocks() const { return ceil_div(seqlen_k(), tile_shape(*this).keys); }

Block Slice::key_block(int64_t index) const {
  const int64_t step = tile_shape(*this).keys;
  return Block{index * step, (index + 1) * step} & Block{0, seqlen_k()};
}

bool Slice::may_hide(Block keys) const {
  const bool by_band =
      terms.band.limited() &&
      (terms.band_offset.defined() || !terms.band.full_keys({0, seqlen_q()}).contains(keys));
  return by_band || terms.query_exists.defined() || terms.key_exists.defined() ||
         terms.bias.defined();
}

Block Slice::visible_keys(Block rows, Block keys) const {
  constexpr int64_t kEdge = 64;
  const Block visible = terms.visible_keys(rows, keys);
  if (!on_gpu || visible.size() == 0) return visible;
  return keys & Block{visible.first / kEdge * kEdge, ceil_div(visible.last, kEdge) * kEdge};
}

Block Slice::first_keys(Block rows, Block range) const {
  // Products of 257 columns are slower than of 256: the edges between masked and full move to
  // multiples of 64, so that a masked block may begin or end with keys that all rows see.
  constexpr int64_t kEdge = 64;
  Block keys = range & Block{range.first, range.first + tile_shape(*this).keys};
  if (on_gpu) return keys;
  const Block seen_by_all = terms.full_keys(rows, range);
  const Block full = {ceil_div(seen_by_all.first, kEdge) * kEdge, seen_by_all.last / kEdge * kEdge};
  for (const int64_t edge : {full.first, full.last}) {
    if (full.size() > 0 && keys.first < edge) keys.last = std::min(keys.last, edge);
  }
  return keys;
}

Tensor Slice::tile(const Tensor& x, Block rows) const {
  return load_tile(x, rows, batches.size() * kv_heads.size());
}

Tensor Slice::unpack_queries(const Tensor& tile) const {
  return unpack(tile, batches.size(), heads.size());
}

Tensor Slice::unpack_keys(const Tensor& tile) const {
  return unpack(tile, batches.size(), kv_heads.size());
}

Tensor Slice::scaled_queries(Block rows) const { return tile(q, rows) * terms.query_scale(); }

Tensor Slice::sink_column(Block rows) const {
  if (!sink.defined()) return {};
  return tile(sink.expand({batches.size(), heads.size(), rows.size(), 1}), {0, rows.size()});
}

Tensor Slice::lse_column(const Tensor& lse, Block rows) const {
  const double limit = lse.scalar_type() == at::kDouble ? kMaxLseFp64 : kMaxLse;
  const Tensor natural = tile(lse, rows);
  const Tensor column = natural * kLog2E;
  column.masked_fill_(natural.abs().gt(limit), kInf);
  if (row_exists.defined()) {
    const Tensor missing = row_exists.narrow(2, rows.first, rows.size()).logical_not();
    unpack_queries(column).masked_fill_(missing, kInf);
  }
  return column;
}

Tensor Slice::dropout_factors(Block rows, Block keys) const {
  if (!terms.dropout) return {};
  return pack(terms.dropout.factors(rows, keys, compute_dtype(q)),
              batches.size() * kv_heads.size());
}

Call::Call(const Args& args)
    : args(args),
      queries({args.q, args.cu_seqlens_q, args.seqused_q, std::nullopt, args.max_seqlen_q}),
      keys({args.k, args.cu_seqlens_k, args.seqused_k, args.leftpad_k, args.max_seqlen_k}),
      on_gpu(has_kernels(args.q)),
      one_slice_(!host_reads(args.q)),
      kv_heads_each_(one_slice_ ? args.k.size(-2)
                                : kv_heads_of_slice(args, queries.batch(), queries.longest(),
                                                    keys.longest())) {
  if (args.dropout_p > 0 && !on_gpu) {
    dropout_ = Dropout(args.dropout_p, *args.rng_state, queries.batch(), args.q.size(-2),
                       args.dropout_place);
  }
}

int64_t Call::slices_each() const { return ceil_div(args.k.size(-2), kv_heads_each_); }

int64_t Call::count_slices() const {
  if (args.q.numel() == 0 || queries.batch() == 0) return 0;
  return one_slice_ ? 1 : queries.batch() * slices_each();
}

bool Call::owns_bias() const {
  if (count_slices() <= 1) return true;
  const Tensor& bias = *args.attn_bias;
  const auto varies = [&](int64_t dim, int64_t count) {
    return count == 1 || (bias.dim() >= dim && bias.size(bias.dim() - dim) > 1);
  };
  return varies(4, queries.batch()) && varies(3, slices_each());
}

void Call::for_slices(bool independent, const std::function<void(const Slice&)>& body) const {
  run_tasks(count_slices(), independent && host_reads(args.q),
            [&](int64_t index) { body(slice(index)); });
}

void Call::for_row_blocks(const std::function<void(const Slice&, Block)>& body) const {
  const int64_t slices = count_slices();
  if (slices == 0) return;
  const Slice first = slice(0);
  const int64_t blocks = ceil_div(queries.max_length(), rows_per_block(first));
  run_tasks(slices * blocks, /*independent=*/host_reads(args.q), [&](int64_t task) {
    // The last rows first: with a causal mask they have the most work, and so the workers end
    // together.
    const Slice slice = task < blocks ? first : this->slice(task / blocks);
    const Block rows = slice.row_block(blocks - 1 - task % blocks);
    if (rows.size() > 0) body(slice, rows);
  });
}

int64_t kv_heads_of_slice(const Args& args, int64_t batch, int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t kv_heads = args.k.size(-2), group = args.q.size(-2) / kv_heads;
  const int64_t rows = std::min(seqlen_q * group, kCpuTile.rows);
  const int64_t keys = std::min(seqlen_k, kCpuTile.keys);
  const int64_t numbers = rows * keys + (rows + keys) * (args.q.size(-1) + args.v.size(-1));
  const int64_t that_fit = std::max<int64_t>(kCpuTileNumbers / std::max<int64_t>(numbers, 1), 1);
  const int64_t cores = numbers * kv_heads > kOneCoreNumbers ? at::get_num_threads() : 1;
  const int64_t slices =
      std::max(ceil_div(kv_heads, that_fit), ceil_div(cores, std::max<int64_t>(batch, 1)));
  return ceil_div(kv_heads, std::clamp<int64_t>(slices, 1, kv_heads));
}

Slice start_slice(const Args& args, Block batches, Block kv_heads) {
  const int64_t group = args.q.size(-2) / args.k.size(-2);
  const auto limit = [](int64_t window) {
    return window < 0 ? Band::kNoLimit : std::min(window, Band::kNoLimit);
  };
  Slice slice;
  slice.on_gpu = has_kernels(args.q);
  slice.batches = batches;
  slice.kv_heads = kv_heads;
  slice.heads = {kv_heads.first * group, kv_heads.last * group};
  slice.terms.batch = batches.size();
  slice.terms.heads = slice.heads.size();
  slice.terms.softmax_scale = args.softmax_scale;
  slice.terms.softcap = args.softcap;
  slice.terms.wants_max_logits = args.wants_max_logits;
  slice.terms.band = {0, limit(args.window_left), limit(args.window_right)};
  if (args.alibi_slopes) {
    slice.terms.alibi_slopes = broadcast_part(args.alibi_slopes->unsqueeze(-1).unsqueeze(-1), slice)
                                   .clamp(kMinSlope, kMaxSlope);
  }
  if (args.learnable_sink) {
    const Tensor sink = args.learnable_sink->narrow(0, slice.heads.first, slice.heads.size());
    slice.sink = sink.to(compute_dtype(args.q)).view({1, -1, 1, 1});
  }
  return slice;
}

Slice Call::slice(int64_t index) const {
  const int64_t b = index / slices_each(), h = index % slices_each() * kv_heads_each_;
  const Block kv_heads = Block{h, h + kv_heads_each_} & Block{0, args.k.size(-2)};
  Slice slice =
      start_slice(args, one_slice_ ? Block{0, queries.batch()} : Block{b, b + 1}, kv_heads);
  const auto heads_of = [&](const Tensor& x, Block heads) { return narrowed(x, 1, heads); };
  slice.q = heads_of(queries.load(args.q, slice.batches), slice.heads);
  slice.k = heads_of(keys.load(args.k, slice.batches), slice.kv_heads);
  slice.v = heads_of(keys.load(args.v, slice.batches), slice.kv_heads);
  if (queries.padded()) slice.row_exists = queries.exists().unsqueeze(1).unsqueeze(-1);
  add_terms(slice);
  return slice;
}

void Call::add_terms(Slice& slice) const {
  ScoreTerms& terms = slice.terms;
  if (!args.top_left && (queries.padded() || keys.padded())) {
    terms.band_offset = (keys.lengths() - queries.lengths()).view({-1, 1, 1, 1});
  } else if (!args.top_left) {
    terms.band.offset = slice.seqlen_k() - slice.seqlen_q();
  }
  if (queries.padded()) terms.query_exists = queries.exists().unsqueeze(1).unsqueeze(-1);
  if (keys.padded()) terms.key_exists = keys.exists().unsqueeze(1).unsqueeze(1);
  if (args.attn_bias) terms.bias = broadcast_part(*args.attn_bias, slice);
  if (dropout_) terms.dropout = dropout_.part(slice.batches, slice.heads);
  if (on_gpu && args.dropout_p > 0) {
    terms.dropout_params =
        DropoutParams::make(args.dropout_p, args.rng_state->const_data_ptr<int64_t>(),
                            static_cast<int>(args.q.size(-2)), args.dropout_place);
  }
}

Tensor lse_tokens(const Tensor& lse) { return lse.transpose(-2, -1).unsqueeze(-1); }

Tensor broadcast_part(const Tensor& x, const Slice& slice) {
  Tensor part = x;
  while (part.dim() < 4) part = part.unsqueeze(0);
  if (part.size(0) > 1) part = part.narrow(0, slice.batches.first, slice.batches.size());
  if (part.size(1) > 1) part = part.narrow(1, slice.heads.first, slice.heads.size());
  return part;
}

}  // namespace flash_attn::aten
