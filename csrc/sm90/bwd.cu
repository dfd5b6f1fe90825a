#include "bwd.h"

#include <algorithm>

#include "../cuda/bwd_steps.h"
#include "bwd_config.h"
#include "bwd_work.cuh"
#include "config.h"
#include "tile/tensor_map.h"

namespace flash_attn::sm90 {
namespace {

// Whether kernels of their own serve the terms: ALiBi, a bias that broadcasts the queries or that
// TMA can read, or ALiBi and such a bias; softcap; dropout.
bool has_some_terms(const BwdParams& params) {
  const ScoreParams& score = params.score;
  const bool has_bias = score.bias.data != nullptr;
  const bool has_dropout = params.dropout.rng_state != nullptr;
  const bool additive = score.alibi_slopes != nullptr || has_bias;
  return additive + (score.softcap != 0) + has_dropout == 1 &&
         (!has_bias || broadcasts_queries(score.bias) || can_stage_bias(params));
}

// Whether it runs in the narrower class of kernels for some terms.
bool is_narrow_with_terms(const BwdParams& params) {
  return has_some_terms(params) &&
         std::max(params.head_dim, params.head_dim_v) <= kBwdNarrowTermsClass;
}

// Whether the kernels for splits, and for fp32 dK and dV, can serve the call; and whether they do.
bool may_split(const BwdParams& params) {
  return std::max(params.head_dim, params.head_dim_v) <= kBwdSplitClass &&
         !cuda::has_score_terms(params) && !params.deterministic;
}
bool runs_split(const BwdParams& params) {
  return params.splits.count > 1 || params.wide_key_gradients;
}
int split_class(const BwdParams& params) {
  return std::max(params.head_dim, params.head_dim_v) <= kBwdNarrowSplitClass ? kBwdNarrowSplitClass
                                                                              : kBwdSplitClass;
}

// How many queries of a head at most see a tile's keys.
int64_t queries_of_tile(const BwdParams& params) {
  if (params.window_left < 0 || params.window_right < 0) return params.seqlen_q;
  const int64_t window = int64_t{params.window_left} + params.window_right + kBwdBlockN;
  return std::min<int64_t>(params.seqlen_q, window);
}

// The time that tiles take in so many splits each, in queries that a multiprocessor walks over.
// walk: how many a tile walks over that all queries see. If not all sequences are alike, half of
// the queries see a tile in the mean, and long tiles come first.
double time_in_splits(int tiles, int splits, double walk, bool alike, int num_sms) {
  const double cost = splits > 1 ? kBwdSplitCost : 0, longest = walk / splits + cost;
  if (alike) return (tiles * splits + num_sms - 1) / num_sms * longest;
  return std::max(tiles * splits * (walk / 2 / splits + cost) / num_sms, longest);
}

// How many keys a query sees in the mean. All sequences of a varlen call count as the longest.
double mean_seen_keys(const BwdParams& params) {
  const double queries = std::max(params.seqlen_q, 1), keys = params.seqlen_k;
  const double diagonal = params.top_left ? 0 : keys - queries;
  // In the mean over all queries i, how many keys come before key i + first.
  const auto keys_before = [&](double first) {
    const auto integral = [&](double end) {  // of the keys before key x, over x < end
      const double inside = std::clamp(end, 0., keys);
      return inside * inside / 2 + std::max(end - keys, 0.) * keys;
    };
    return (integral(first + queries) - integral(first)) / queries;
  };
  const double begin = params.window_left < 0 ? 0 : keys_before(diagonal - params.window_left);
  const double end =
      params.window_right < 0 ? keys : keys_before(diagonal + params.window_right + 1);
  return end - begin;
}

// Whether queries and keys see so few of each other that sums in order may be a pool.
bool see_few_in_order(const BwdParams& params) {
  const double keys = mean_seen_keys(params);
  const double queries = keys * params.seqlen_q / std::max(params.seqlen_k, 1);
  return std::max(keys, queries) <= kBwdMostSeenInOrder;
}

bool is_varlen(const BwdParams& params) {
  return params.cu_seqlens_q != nullptr || params.cu_seqlens_k != nullptr;
}

// How many queries of a head may see a tile, or a varlen call's longest sequence may have, where
// the sums of dQ are a pool. 0: they are none.
int most_pooled_queries(const BwdParams& params, const BwdTile& tile) {
  const int group = params.heads_q / params.heads_kv;
  const bool narrow = params.head_dim <= kBwdNarrowHeadDim;
  const int most_keys = narrow ? kBwdNarrowPooledKeys : tile.pooled_keys;
  if (cuda::has_score_terms(params) || runs_split(params) || params.wide_query_gradient) return 0;
  if (is_varlen(params)) {
    const bool both = params.cu_seqlens_q != nullptr && params.cu_seqlens_k != nullptr;
    if (!both || group > 1 || params.deterministic) return 0;
    return std::min(kBwdPooledVarlenQueries, most_keys);
  }
  if (params.deterministic) return see_few_in_order(params) ? tile.queries_pooled_in_order : 0;
  if (mean_seen_keys(params) > most_keys || group > kBwdLargestPooledGroup) return 0;
  return group == 1 ? kBwdPooledQueries : kBwdMostPooledOfGroup;
}

// Whether a pool of whole heads spares enough.
bool pays(const BwdParams& params, const BwdTile& tile, const DqPool& pool) {
  const auto rows = static_cast<double>(bwd_dq_pool_rows(params, pool));
  const double all_rows = static_cast<double>(params.total_q) * params.heads_kv;
  const double counted_rows = rows * params.batch * params.heads_kv;
  double largest = kBwdLargestPool;
  if (params.heads_q > params.heads_kv) largest = kBwdLargestPoolOfGroup;
  // It has the columns of the class, and shall not be larger than dQ in fp32.
  BwdParams pooled = params;
  pooled.dq_pool = pool;
  const double cols = bwd_dq_accum_cols(pooled, /*masked=*/false);
  largest = std::min(largest, params.head_dim / cols);
  if (is_varlen(params)) {
    if (counted_rows > kBwdMostCountedRows * all_rows) return false;
  } else if (params.window_right >= 0 && params.seqlen_q > kBwdLongCausalQueries) {
    largest = std::min(largest, tile.largest_causal_pool);
  }
  return pool.places * rows <= largest * all_rows;
}

}  // namespace

BwdSplits bwd_splits(const BwdParams& params, const cuda::DeviceInfo& device) {
  if (!may_split(params)) return {};
  const int tiles =
      make_bwd_scheduler<TileScheduler<kBwdBlockN, TileOrder::kAsTold>>(params, device.num_sms)
          .num_tiles();
  const double walk =
      static_cast<double>(queries_of_tile(params)) * (params.heads_q / params.heads_kv);
  const bool alike = sequences_are_alike(params);
  const auto time = [&](int splits) {
    return time_in_splits(tiles, splits, walk, alike, device.num_sms);
  };
  int best = 1;
  for (int n = 2; int64_t{tiles} * n <= kBwdMaxSplits * device.num_sms; ++n) {
    if (time(n) < time(best)) best = n;
  }
  if (best == 1) return {};
  // Of every two splits one leaves its gradients (bwd_split.cuh).
  const int64_t places = int64_t{tiles} * ((best + 1) / 2);
  return {.count = best,
          .num_sums = places * kBwdBlockN * 2 * split_class(params),
          .num_arrivals = int64_t{tiles} * kBwdSplitWarps * 2 * best};
}

bool writes_wide_key_gradients(const BwdParams& params) { return may_split(params); }

bool stores_bias_gradient(const BwdParams& params) {
  return std::max(params.head_dim, params.head_dim_v) <= kBwdMaxSingleHeadDim &&
         has_some_terms(params) && can_stage_bias_gradient(params);
}

bool computes_bias_gradient(const BwdParams& params) {
  const BiasGradientParams& gradient = params.dbias;
  // A bias lies where Q and dO do, in slabs that both have or both lack: what a load leaves out
  // must stay 0.
  const auto is_narrow = [](int head_dim) { return head_dim <= kBwdNarrowTermsClass; };
  return std::max(params.head_dim, params.head_dim_v) <= kBwdMaxSingleHeadDim &&
         is_narrow(params.head_dim) == is_narrow(params.head_dim_v) && params.score.softcap == 0 &&
         params.dropout.rng_state == nullptr && can_stage_bias(params) &&
         gradient.dtype == params.dtype && gradient.keys % 8 == 0;
}

int bwd_dq_accum_cols(const BwdParams& params, bool masked) {
  const int widest = std::max(params.head_dim, params.head_dim_v);
  if (cuda::has_score_terms(params) && widest <= kBwdMaxSingleHeadDim) {
    return is_narrow_with_terms(params) ? kBwdNarrowTermsClass : kBwdScoresClass;
  }
  if (runs_split(params)) return params.head_dim;
  const bool pools = params.dq_pool.places > 0;
  if (masked) {
    return with_masked_class(params.head_dim, params.head_dim_v,
                             [&]<int kHeadDim> { return pools ? kHeadDim : params.head_dim; });
  }
  return with_bwd_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim, int kHeadDimV> {
    const bool of_class = pools || params.deterministic || kBwdTile<kHeadDim>.keeps_dq_cols;
    return of_class ? kHeadDim : params.head_dim;
  });
}

bool computes_dq_apart(const BwdParams& params, const cuda::DeviceInfo& device) {
  const bool is_widest =
      with_bwd_class(params.head_dim, params.head_dim_v,
                     [&]<int kHeadDim, int kHeadDimV> { return kHeadDim == kBwdDqApartClass; });
  // With fewer queries, half a thread block or more would have none.
  const bool has_queries = params.total_q >= int64_t{params.batch} * kBwdDqApartBlockM;
  const int most_keys = params.deterministic ? kBwdDqApartKeysInOrder : kBwdDqApartKeys;
  if (!is_widest || !has_queries || mean_seen_keys(params) > most_keys ||
      params.wide_query_gradient) {
    return false;
  }
  const int tiles =
      TileScheduler<kBwdDqApartBlockN>::make(params.cu_seqlens_k, params.total_k, params.seqlen_k,
                                             params.batch, params.heads_kv, 0)
          .num_tiles();
  const int dq_tiles =
      TileScheduler<kBwdDqApartBlockM>::make(params.cu_seqlens_q, params.total_q, params.seqlen_q,
                                             params.batch, params.heads_q, 0)
          .num_tiles();
  return tiles >= kBwdDqApartRounds * device.num_sms || int64_t{tiles} + dq_tiles <= device.num_sms;
}

DqPool bwd_dq_pool(const BwdParams& params, const cuda::DeviceInfo& device, bool masked) {
  const BwdTile tile =
      masked ? with_masked_class(params.head_dim, params.head_dim_v,
                                 [&]<int kHeadDim> { return kBwdTile<kHeadDim>; })
             : with_bwd_class(params.head_dim, params.head_dim_v,
                              [&]<int kHeadDim, int kHeadDimV> { return kBwdTile<kHeadDim>; });
  if (tile.pool_rounds == 0) return {};
  const int64_t walk = queries_of_tile(params);
  DqPool pool;
  if (!masked) {
    const int most = most_pooled_queries(params, tile);
    const bool may_have_stretches = tile.pools_stretches && params.heads_q == params.heads_kv &&
                                    !params.deterministic && !is_varlen(params);
    const bool has_stretches = params.seqlen_q > most;
    if (params.seqlen_q == 0 || walk > most || (has_stretches && !may_have_stretches)) return {};
    if (has_stretches) pool.stretches = (params.seqlen_q - 1) / kBwdStretchRows + 1;
  }
  // Places for so many tiles, and in each head for those stretches besides that its tiles begin or
  // end in.
  const double tiles = tile.pool_rounds * device.num_sms;
  double of_head = std::max((params.seqlen_k + kBwdBlockN - 1) / kBwdBlockN, 1);
  if (is_varlen(params)) {
    const double mean_keys = static_cast<double>(params.total_k) / std::max(params.batch, 1);
    of_head = std::clamp(mean_keys / kBwdBlockN, 1., of_head);
  }
  double places = tiles / of_head + 2;
  if (pool.stretches > 1) {
    places = tiles * kBwdBlockN / kBwdStretchRows +
             (tiles / of_head + 1) * static_cast<double>(walk / kBwdStretchRows + 3);
  }
  const auto stretches =
      static_cast<double>(int64_t{params.batch} * params.heads_kv * pool.stretches);
  pool.places = static_cast<int>(std::min(stretches, places));
  const bool always_pays = masked || params.deterministic || pool.stretches > 1;
  return always_pays || pays(params, tile, pool) ? pool : DqPool{};
}

int64_t bwd_dq_pool_rows(const BwdParams& params, const DqPool& pool) {
  if (pool.stretches > 1) return kBwdStretchRows;
  return (int64_t{params.seqlen_q} + kBwdPoolRows - 1) / kBwdPoolRows * kBwdPoolRows;
}

void run_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  cuda::run_bwd_steps(params, DqAccumOrder::kByLane, stream, [&] {
    cuda::with_dtype(params.dtype, [&]<DType kDType> {
      if (is_narrow_with_terms(params)) {
        launch_bwd_with_some_terms<kDType, kBwdNarrowTermsClass>(params, device, stream);
      } else if (has_some_terms(params)) {
        launch_bwd_with_some_terms<kDType, kBwdScoresClass>(params, device, stream);
      } else if (cuda::has_score_terms(params)) {
        launch_bwd_with_scores<kDType, kBwdScoresClass>(params, device, stream);
      } else if (runs_split(params)) {
        split_class(params) == kBwdNarrowSplitClass
            ? launch_bwd_split<kDType, kBwdNarrowSplitClass>(params, device, stream)
            : launch_bwd_split<kDType, kBwdSplitClass>(params, device, stream);
      } else if (params.dq_accum == nullptr) {
        launch_bwd_dq_apart<kDType, kBwdDqApartClass>(params, device, stream);
      } else {
        with_bwd_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim, int kHeadDimV> {
          if constexpr (kHeadDim > kBwdMaxSingleHeadDim) {
            launch_bwd_pair<kDType, kHeadDim, kHeadDimV>(params, device, stream);
          } else {
            launch_bwd<kDType, kHeadDim>(params, device, stream);
          }
        });
      }
    });
  });
}

void run_bwd_dq_of_parts(const BwdParams& params, Stream stream) {
  cuda::run_bwd_convert_dq(params, DqAccumOrder::kByLane, stream);
}

void run_bwd_bias(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  cuda::with_dtype(params.dtype, [&]<DType kDType> {
    std::max(params.head_dim, params.head_dim_v) <= kBwdNarrowTermsClass
        ? launch_bwd_bias<kDType, kBwdNarrowTermsClass>(params, device, stream)
        : launch_bwd_bias<kDType, kBwdScoresClass>(params, device, stream);
  });
}

void run_bwd_masked(const Masked<BwdParams>& params, int32_t* order, const cuda::DeviceInfo& device,
                    Stream stream) {
  // Tiles come head after head. Where a mask alone makes some longer, their order gains nothing.
  MaskOrder ordered;
  if (!sequences_are_alike(params)) ordered = order_mask_tiles(params, order, device, stream);
  cuda::run_bwd_steps(params, DqAccumOrder::kByLane, stream, [&] {
    cuda::with_dtype(params.dtype, [&]<DType kDType> {
      with_masked_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
        if constexpr (kHeadDim > kBwdMaxSingleHeadDim) {
          launch_bwd_pair_masked<kDType, kHeadDim>(params, ordered, device, stream);
        } else {
          launch_bwd_masked<kDType, kHeadDim>(params, ordered, device, stream);
        }
      });
    });
  });
}

}  // namespace flash_attn::sm90
