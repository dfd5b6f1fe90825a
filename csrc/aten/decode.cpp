// Decode: a few new queries against a long cache. There are too few rows to give all cores work, so
// the keys are cut into splits, and the splits' softmax states (o, l, m) are merged at the end:
//
//   for each split s of the keys                      (in parallel)
//     (o_s, l_s, m_s) = attend(Q, K_s, V_s)           forward's loop
//   m = max_s m_s,  l = Σ_s exp(m_s − m) l_s,  o = Σ_s exp(m_s − m) o_s
//   O = o / l,  LSE = m + log l
#include <algorithm>
#include <vector>

#include "aten/attend.h"
#include "aten/attention.h"
#include "aten/parallel.h"
#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

namespace {

// Where num_splits is 0. A constant, so that a sequence's result has the same bits in every batch.
constexpr int64_t kKeysPerSplit = 1024;

// Some rows of a slice against one split of the keys that they see.
struct Piece {
  const Slice* slice;
  Block rows, keys;
  bool first;  // of these rows
  OnlineSoftmax state;
};

// Adds the pieces of a block of rows, at least one.
void cut_into_splits(const Slice& slice, Block rows, int64_t num_splits,
                     std::vector<Piece>& pieces) {
  const Block visible = slice.terms.visible_keys(rows, slice.seqlen_k());
  const int64_t step = num_splits > 0
                           ? std::max<int64_t>((visible.size() + num_splits - 1) / num_splits, 1)
                           : kKeysPerSplit;
  Block left = visible;
  do {
    const Block keys = left & Block{left.first, left.first + step};
    pieces.push_back({&slice, rows, keys, left.first == visible.first, {}});
    left.first += step;
  } while (left.size() > 0);
}

// A paged cache (num_pages, page_size, heads, d) gathered to (batch, capacity, heads, d).
struct GatheredCache {
  Tensor k, v;
  // bool (batch, 1, 1, capacity), false where block_table names no page; undefined: it always does.
  Tensor key_exists;
};

GatheredCache gather_pages(const DecodeArgs& args) {
  const int64_t pages = args.k_cache.size(0), page_size = args.k_cache.size(1);
  Tensor table = args.block_table->to(at::kLong);
  if (args.cache_seqlens && host_reads(*args.cache_seqlens) && table.numel() > 0) {
    // The table may be far wider than what is used.
    const int64_t longest = std::max<int64_t>(args.cache_seqlens->max().item<int64_t>(), 0);
    table = table.narrow(1, 0, std::min((longest + page_size - 1) / page_size, table.size(1)));
  }
  const Tensor named = table.ge(0).logical_and_(table.lt(pages));
  const Tensor index = table.clamp(0, std::max<int64_t>(pages - 1, 0)).flatten();
  const auto gather = [&](const Tensor& cache) {
    return cache.index_select(0, index).view(
        {table.size(0), table.size(1) * page_size, cache.size(2), cache.size(3)});
  };
  const bool known_good = host_reads(named) && named.all().item<bool>();
  const Tensor key_exists = named.repeat_interleave(page_size, 1).unsqueeze(1).unsqueeze(1);
  return {gather(args.k_cache), gather(args.v_cache), known_good ? Tensor() : key_exists};
}

Args as_attention(const DecodeArgs& args, const GatheredCache& cache) {
  const bool paged = args.block_table.has_value();
  return {.q = args.q,
          .k = paged ? cache.k : args.k_cache,
          .v = paged ? cache.v : args.v_cache,
          .cu_seqlens_q = {},
          .cu_seqlens_k = {},
          .seqused_q = {},
          .seqused_k = args.cache_seqlens,
          .leftpad_k = {},
          .attn_bias = {},
          .alibi_slopes = args.alibi_slopes,
          .learnable_sink = args.learnable_sink,
          .rng_state = {},
          .max_seqlen_q = args.q.size(1),
          .max_seqlen_k = paged ? cache.k.size(1) : args.k_cache.size(1),
          .softmax_scale = args.softmax_scale,
          .window_left = args.window_left,
          .window_right = args.window_right,
          .softcap = args.softcap};
}

std::vector<Slice> load_slices(const Call& call, const Tensor& key_exists) {
  std::vector<Slice> slices;
  for (int64_t i = 0; i < call.count_slices(); ++i) {
    Slice slice = call.slice(i);
    if (key_exists.defined()) {
      const Tensor exists = broadcast_part(key_exists, slice).narrow(-1, 0, slice.seqlen_k());
      Tensor& known = slice.terms.key_exists;
      known = known.defined() ? known.logical_and(exists) : exists;
    }
    slices.push_back(std::move(slice));
  }
  return slices;
}

}  // namespace

std::tuple<Tensor, Tensor> decode(const DecodeArgs& args) {
  const GatheredCache cache = args.block_table ? gather_pages(args) : GatheredCache{};
  const Args attention = as_attention(args, cache);
  const Call call(attention);
  const auto [out, lse] = make_outputs(attention);
  const Result out_rows(call.queries, out), lse_rows(call.queries, lse_tokens(lse));

  const std::vector<Slice> slices = load_slices(call, cache.key_exists);
  std::vector<Piece> pieces;
  for (const Slice& slice : slices) {
    for (int64_t i = 0; i < slice.count_row_blocks(); ++i) {
      cut_into_splits(slice, slice.row_block(i), args.num_splits, pieces);
    }
  }
  run_tasks(pieces.size(), /*independent=*/host_reads(args.q), [&](int64_t i) {
    Piece& piece = pieces[i];
    const Tensor sink = piece.first ? piece.slice->sink_column(piece.rows) : Tensor();
    piece.state = attend(*piece.slice, piece.rows, piece.keys, sink);
  });

  // The pieces of one block of rows lie one after the other.
  for (size_t i = 0; i < pieces.size();) {
    Piece& whole = pieces[i];
    for (++i; i < pieces.size() && !pieces[i].first; ++i) whole.state.merge(pieces[i].state);
    write_rows(out_rows, lse_rows, *whole.slice, whole.rows, whole.state);
  }
  return {out, lse};
}

}  // namespace flash_attn::aten
