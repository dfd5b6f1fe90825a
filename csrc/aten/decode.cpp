// Decode: a few new queries against a long cache. There are too few rows to give all cores work, so
// the keys are cut into splits, and the splits' softmax states (o, l, m) are merged at the end:
//
//   for each split s of the keys                      (in parallel)
//     (o_s, l_s, m_s) = attend(Q, K_s, V_s)           forward's loop
//   m = max_s m_s,  l = Σ_s exp(m_s − m) l_s,  o = Σ_s exp(m_s − m) o_s
//   O = o / l,  LSE = m + log l
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "aten/attend.h"
#include "aten/attention.h"
#include "aten/cache.h"
#include "aten/gpu_tiles.h"
#include "aten/parallel.h"
#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

namespace {

// Where num_splits is 0. A constant, so that a sequence's result has the same bits in every batch.
constexpr int64_t kKeysPerSplit = 1024;

// A slice and the positions of the cache that any of its sequences has keys at.
struct CacheSlice {
  Slice slice;
  Block keys;
  std::optional<Cache::Places> places;  // of all positions, where only the device knows lengths
};

// Some rows of a slice against one split of the keys that they see.
struct Piece {
  const CacheSlice* part;
  Block rows, keys;
  bool first;  // of these rows
  OnlineSoftmax state;
};

// Adds the pieces of a block of rows, at least one.
void cut_into_splits(const CacheSlice& part, Block rows, int64_t num_splits,
                     std::vector<Piece>& pieces) {
  const Slice& slice = part.slice;
  const Block visible = slice.terms.visible_keys(rows, part.keys);
  const int64_t step =
      slice.on_gpu     ? std::max<int64_t>(visible.size(), 1)  // a tile has work for all of it
      : num_splits > 0 ? std::max<int64_t>((visible.size() + num_splits - 1) / num_splits, 1)
                       : kKeysPerSplit;
  Block left = visible;
  do {
    const Block split = left & Block{left.first, left.first + step};
    pieces.push_back({&part, rows, split, left.first == visible.first, {}});
    left.first += step;
  } while (left.size() > 0);
}

// The tree as a mask of all positions: (batch, 1, seqlen_q, capacity). What lies before the last
// keys is kept.
std::optional<Tensor> bias_of(const DecodeArgs& args, const Cache& cache) {
  if (!args.tree_mask || args.q.numel() == 0) return args.attn_bias;
  const int64_t batch = args.q.size(0), tokens = args.q.size(1);
  const Tensor lengths = cache.lengths();
  const Tensor position = at::arange(cache.capacity(), lengths.options());
  const Tensor column = (position - lengths.unsqueeze(-1) + tokens).unsqueeze(1);
  const Tensor kept =
      args.tree_mask->expand({batch, tokens, tokens})
          .gather(-1, column.clamp(0, tokens - 1).expand({batch, tokens, cache.capacity()}));
  return column.lt(0).logical_or(kept).unsqueeze(1);
}

Args as_attention(const DecodeArgs& args, const Cache& cache) {
  return {.q = args.q,
          .k = args.k_cache,
          .v = args.v_cache,
          .attn_bias = bias_of(args, cache),
          .alibi_slopes = args.alibi_slopes,
          .learnable_sink = args.learnable_sink,
          .max_seqlen_q = args.q.size(1),
          .max_seqlen_k = args.k_cache.size(1),
          .softmax_scale = args.softmax_scale,
          .window_left = args.window_left,
          .window_right = args.window_right,
          .softcap = args.softcap,
          .wants_max_logits = args.wants_max_logits};
}

// Sequences of one length that the host knows: one sequence, or all of a full cache.
void bound_on_host(CacheSlice& part, const Cache& cache, Block keys) {
  ScoreTerms& terms = part.slice.terms;
  part.keys = keys;
  terms.band.offset = keys.last - part.slice.seqlen_q();
  if (!cache.all_exist(part.slice.batches.first, part.keys)) {
    const Tensor position =
        at::arange(cache.capacity(), part.slice.q.options().dtype(at::kLong)).unsqueeze(0);
    terms.key_exists = cache.places(part.slice.batches, position).exists.unsqueeze(1).unsqueeze(1);
  }
}

// Sequences of lengths that only the device knows: every position is visited, what is none of
// theirs is masked.
void bound_on_device(CacheSlice& part, const Cache& cache, const Tensor& lengths,
                     const Tensor& leftpad) {
  const Block batches = part.slice.batches;
  const auto column = [&](const Tensor& x) {
    return x.narrow(0, batches.first, batches.size()).unsqueeze(-1);
  };
  part.keys = {0, cache.capacity()};
  part.slice.terms.band_offset =
      (column(lengths) - part.slice.seqlen_q()).unsqueeze(-1).unsqueeze(-1);
  if (part.keys.size() == 0) return;
  const Tensor position = at::arange(cache.capacity(), lengths.options()).unsqueeze(0);
  part.places = cache.places(batches, position);
  part.slice.terms.key_exists = part.places->exists.logical_and(position.lt(column(lengths)))
                                    .logical_and_(position.ge(column(leftpad)))
                                    .unsqueeze(1)
                                    .unsqueeze(1);
}

// On the host one sequence and some kv heads each, as many as if it was alone. Elsewhere everything
// at once, or one sequence each if its bits must not depend on the others.
std::vector<CacheSlice> cut_into_slices(const DecodeArgs& args, const Args& attention,
                                        const Cache& cache) {
  const int64_t batch = args.q.size(0), heads_kv = args.k_cache.size(2);
  std::vector<CacheSlice> slices;
  if (args.q.numel() == 0) return slices;
  const bool on_host = host_reads(args.q);
  const int64_t batches_each = on_host || args.batch_invariant ? 1 : batch;
  Tensor lengths, leftpad;
  if (!cache.full()) {
    lengths = cache.lengths();
    leftpad = cache.leftpad();
  }
  for (int64_t b = 0; b < batch; b += batches_each) {
    const Block keys = cache.full() || !on_host ? Block{0, cache.capacity()}
                                                : Block{leftpad.const_data_ptr<int64_t>()[b],
                                                        lengths.const_data_ptr<int64_t>()[b]};
    const int64_t heads_each =
        on_host ? kv_heads_of_slice(attention, 1, args.q.size(1), keys.size()) : heads_kv;
    for (int64_t h = 0; h < heads_kv; h += heads_each) {
      CacheSlice part;
      part.slice = start_slice(attention, {b, b + batches_each},
                               Block{h, h + heads_each} & Block{0, heads_kv});
      if (attention.attn_bias) {
        part.slice.terms.bias = broadcast_part(*attention.attn_bias, part.slice);
      }
      part.slice.q = args.q.narrow(0, b, batches_each)
                         .narrow(2, part.slice.heads.first, part.slice.heads.size())
                         .transpose(1, 2);
      if (part.slice.on_gpu) part.slice.q = part.slice.q.to(cache.tile_dtype());
      if (cache.full() || on_host) {
        bound_on_host(part, cache, keys);
      } else {
        bound_on_device(part, cache, lengths, leftpad);
      }
      slices.push_back(std::move(part));
    }
  }
  return slices;
}

SeenKeys seen_keys(const CacheSlice& part, const Cache& cache, int64_t head_dim_v) {
  return {head_dim_v, [&part, &cache](Block keys) {
            const Slice& slice = part.slice;
            const int64_t batch = slice.batches.size(), kv_heads = slice.kv_heads.size();
            const auto [k, v] = cache.tiles(slice.batches, slice.kv_heads, keys,
                                            part.places ? &*part.places : nullptr);
            return std::pair(matrices_of(unpack(k, batch, kv_heads), kv_heads),
                             SeenOperand(unpack(v, batch, kv_heads), kv_heads, slice.may_hide(keys),
                                         keys.first));
          }};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> decode(const DecodeArgs& args) {
  const Cache cache(args);
  const Args attention = as_attention(args, cache);
  const Sequences queries({args.q, {}, {}, {}, args.q.size(1)});
  const auto [out, lse] = make_outputs(attention, has_kernels(args.q) && args.q.numel() > 0);
  const Tensor max_logits = make_max_logits(attention);
  const Result out_rows(queries, out), lse_rows(queries, lse_tokens(lse));

  const std::vector<CacheSlice> slices = cut_into_slices(args, attention, cache);
  std::vector<Piece> pieces;
  for (const CacheSlice& part : slices) {
    for (int64_t i = 0; i < part.slice.count_row_blocks(); ++i) {
      cut_into_splits(part, part.slice.row_block(i), args.num_splits, pieces);
    }
  }
  const auto attend_piece = [&](int64_t i) {
    Piece& piece = pieces[i];
    const Slice& slice = piece.part->slice;
    if (slice.on_gpu) {
      piece.state = attend_on_gpu(slice, seen_keys(*piece.part, cache, args.v_cache.size(-1)),
                                  piece.rows, piece.keys);
      return;
    }
    const KeyTiles tiles = {args.v_cache.size(-1), [&](Block keys) {
                              return cache.tiles(slice.batches, slice.kv_heads, keys);
                            }};
    const Tensor sink = piece.first ? slice.sink_column(piece.rows) : Tensor();
    piece.state = attend(slice, tiles, piece.rows, piece.keys, sink);
  };
  run_tasks(pieces.size(), /*independent=*/host_reads(args.q), attend_piece,
            /*one_core_each=*/args.batch_invariant);

  // The pieces of one block of rows lie one after the other.
  for (size_t i = 0; i < pieces.size();) {
    Piece& whole = pieces[i];
    for (++i; i < pieces.size() && !pieces[i].first; ++i) whole.state.merge(pieces[i].state);
    const Slice& slice = whole.part->slice;
    if (slice.on_gpu) {
      finish_rows(slice, whole.rows, whole.state, out_rows.part(slice.batches, slice.heads),
                  lse_rows.part(slice.batches, slice.heads));
    } else {
      write_rows(out_rows, lse_rows, slice, whole.rows, whole.state);
    }
    write_max_logits(max_logits, slice, whole.state);
  }
  return {out, lse, max_logits};
}

}  // namespace flash_attn::aten
