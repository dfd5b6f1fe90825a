// What an attention call is, in plain C++20: every kernel reads one of these structs, nothing else.
//
//   S = softmax_scale · Q Kᵀ → softcap → + bias, ALiBi → mask → online softmax → dropout → P V
//
// Layouts. Dense tensors are (batch, seqlen, heads, head_dim). Varlen tensors are (total, heads,
// head_dim): the sequences lie one after the other and cu_seqlens (batch + 1) holds their starts.
// The last dimension is contiguous in both; pointers and strides are multiples of 16 bytes. Strides
// count elements.
//
// cu_seqlens, seqused and leftpad live on the device and may hold anything: kernels clamp them
// (cuda/attn/seqlen.cuh) and stay inside the tensors.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace flash_attn {

using Stream = CUstream_st*;  // = cudaStream_t, without the CUDA header

// Caches alone have 8 bits, and masks alone are kBool, a byte each. kTf32 is fp32 in memory, whose
// products may be those of its numbers rounded to TF32.
enum class DType : uint8_t { kFp16, kBf16, kFp32, kFp64, kFp8E4M3, kInt8, kBool, kTf32 };

constexpr bool is_8bit(DType dtype) { return dtype == DType::kFp8E4M3 || dtype == DType::kInt8; }

struct Strides {
  int64_t batch = 0;  // 0 for varlen
  int64_t row = 0;    // from one token to the next
  int64_t head = 0;

  constexpr bool operator==(const Strides&) const = default;
};

// Where a call lies in a larger one, if it draws its share of that one's dropout mask. With zeros
// it is the larger one itself.
struct DropoutPlace {
  int64_t sequence = 0, head = 0;  // the first ones of this call
  int64_t heads = 0;               // of the larger call; 0: those of this one
  int64_t query = 0, key = 0;      // of each sequence, the first ones: multiples of 16 and of 32
};

// Which elements of P count is a pure function of the state and of an element's place, which
// aten/dropout.h defines. Kernels compare an element's number of 8 bits with `bound`. It stands
// there twice, behind the sign of both halves of a word, so that two fp16 numbers can be compared
// with it, whatever bits follow.
struct DropoutParams {
  const int64_t* rng_state = nullptr;  // (2) seed, offset, on the device; null: no dropout
  uint32_t bound = 0;                  // at most 2^14 a half, so no NaN
  uint32_t mirror = 0;                 // 0: kept iff number >= bound; all bits: iff below it
  float keep = 1;                      // the keep probability
  float scale = 1;                     // of what is kept: its inverse

  // DropoutPlace, as kernels use it. first_number is batch · heads_q + head of this call's first
  // head, counted in the larger call, which has more_heads more than the `heads` of this one. So
  // many pairs of queries and fours of keys lie before the first ones (cuda/attn/dropout.cuh).
  int64_t first_number = 0;
  uint32_t heads = 1, more_heads = 0;
  int32_t first_pair = 0, first_four = 0;

  // probability: in [0, 1], of being dropped. heads: of the call.
  static constexpr DropoutParams make(double probability, const int64_t* rng_state, int heads = 1,
                                      const DropoutPlace& place = {}) {
    constexpr uint32_t kNumbers = 1 << 8, kTwice = 0x00800080;
    const auto threshold = static_cast<uint32_t>(probability * kNumbers + 0.5);
    const uint32_t keeping = kNumbers - threshold;
    if (threshold == 0) return {};
    const int64_t all_heads = place.heads == 0 ? heads : place.heads;
    return {.rng_state = rng_state,
            .bound = (threshold <= kNumbers / 2 ? threshold : keeping) * kTwice,
            .mirror = threshold <= kNumbers / 2 ? 0 : ~0u,
            // Where nothing is kept, nothing is scaled, and 1 keeps infinity out of the gradients.
            .keep = keeping == 0 ? 1 : static_cast<float>(1.0 * keeping / kNumbers),
            .scale = keeping == 0 ? 1 : static_cast<float>(1.0 * kNumbers / keeping),
            .first_number = place.sequence * all_heads + place.head,
            .heads = static_cast<uint32_t>(heads),
            .more_heads = static_cast<uint32_t>(all_heads - heads),
            .first_pair = static_cast<int32_t>(place.query / 2),
            .first_four = static_cast<int32_t>(place.key / 4)};
  }
};

// What forward and backward share. Sizes and offsets are 64-bit; only the length of one sequence
// fits 32 bits.
struct AttnParams {
  const void* q = nullptr;  // (batch, seqlen_q, heads_q, head_dim) or (total_q, heads_q, head_dim)
  const void* k = nullptr;  // (batch, seqlen_k, heads_kv, head_dim) or (total_k, …)
  const void* v = nullptr;  // (batch, seqlen_k, heads_kv, head_dim_v) or (total_k, …)
  Strides q_strides, k_strides, v_strides;

  DType dtype = DType::kFp16;
  int batch = 0, heads_q = 0, heads_kv = 0;  // query head h reads kv head h / (heads_q / heads_kv)
  int head_dim = 0, head_dim_v = 0;
  // Dense: exact. Varlen: the caller's max_seqlen, only a hint; but where the sums of dQ are a pool,
  // a sequence with more queries has no place there.
  int seqlen_q = 0, seqlen_k = 0;
  int64_t total_q = 0, total_k = 0;  // rows of the whole q and k tensors, over all batches

  const int32_t* cu_seqlens_q = nullptr;  // (batch + 1) or null: dense
  const int32_t* cu_seqlens_k = nullptr;  // (batch + 1) or null: dense
  const int32_t* seqused_q = nullptr;     // (batch) or null: rows of each sequence that count
  const int32_t* seqused_k = nullptr;     // (batch) or null
  const int32_t* leftpad_k = nullptr;     // (batch) or null: keys to skip at the front

  float softmax_scale = 0;
  // Keys that a query sees to each side of its diagonal; -1: all. causal: right = 0.
  int window_left = -1, window_right = -1;
  // Diagonal of query i at key i; otherwise at key i + len_k - len_q (bottom-right).
  bool top_left = false;

  DropoutParams dropout;
};

// An additive bias, or a mask, that broadcasts to (batch, heads_q, rows, keys): a stride is 0 in a
// dimension that it broadcasts. Element (i, j) belongs to query i and key j of a sequence; what
// lies beyond the tensor is not read: keys there are hidden, queries take the last row.
struct BiasParams {
  const void* data = nullptr;  // null: none
  DType dtype = DType::kFp32;  // that of q, kFp32 or kBool (false: hidden)
  int rows = 0,
      keys = 0;  // 2³¹ - 1 in a dimension that it broadcasts, but queries of dense tensors
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
  // Keys lie side by side, and those of an even number and the next are aligned, and both exist.
  bool in_pairs = false;
  // Decode alone: it belongs to the last `keys` keys of each sequence, and those before have none;
  // else key j is position j of the cache.
  bool of_last_keys = false;
};

// One number for all queries.
constexpr bool broadcasts_queries(const BiasParams& bias) {
  return bias.data != nullptr && bias.row_stride == 0;
}

// What happens to the scores between Q Kᵀ and the mask. All zero: plain.
//
//   S = softcap · tanh(S / softcap),    S += bias - slope · |key - diagonal|,
//   l = Σ exp(S) + exp(sink)
struct ScoreParams {
  float softcap = 0;                      // 0: none
  const float* alibi_slopes = nullptr;    // (heads_q) or (batch, heads_q), or null
  int64_t alibi_batch_stride = 0;         // 0: the same for all sequences
  const float* learnable_sink = nullptr;  // (heads_q), or null
  BiasParams bias;
};

// Where the gradient of a bias goes: contiguous, zeroed by the caller, as blocks that no query sees
// are not visited.
struct BiasGradientParams {
  enum class Form : uint8_t {
    kNone,   // not wanted
    kRows,   // of a bias that broadcasts the keys: (batch, heads_q, rows) fp32
    kKeys,   // of one that broadcasts the queries: (batch, heads_q, keys) fp32
    kWhole,  // of one that broadcasts nothing: (batch, heads_q, rows, keys) of its dtype
    kShared  // of one that broadcasts sequences, heads or both: likewise, 1 in their place
  };
  Form form = Form::kNone;
  void* data = nullptr;
  DType dtype = DType::kFp32;  // that of q or kFp32
  int rows = 0, keys = 0;
  int64_t batch_stride = 0, head_stride = 0;  // 0 in a dimension that the bias broadcasts
};

// Workspace: the normalised results of pieces of the keys, to be merged. Which row is whose:
// cuda/decode/workspace.h.
struct PartialResults {
  float* o = nullptr;    // (rows, head_dim_v)
  float* lse = nullptr;  // (rows)
};

// Keys that lie in pages: k and v are (num_pages, page_size, heads_kv, head_dim or head_dim_v), and
// key j of a sequence is row j % page_size of the page that its row of the table names at j /
// page_size. The table lives on the device and may hold anything: an entry that names no page has
// no keys.
struct PageTable {
  static constexpr int kMultiple = 8;  // of page_size

  const int32_t* entries = nullptr;  // (rows, max_pages), or null: no pages
  int64_t row_stride = 0;
  int page_size = 0, num_pages = 0;
};

struct FwdParams : AttnParams {
  ScoreParams score;

  // seqlen_k is what a row of the table has room for; the lengths are seqused_k.
  PageTable pages;
  // Where k and v are a cache: sequence b's keys lie in row cache_batch_idx[b] of it, or of the page
  // table, of cache_rows; null: in row b.
  const int32_t* cache_batch_idx = nullptr;
  int cache_rows = 0;
  int seqlen_new = 0;  // keys of each sequence that seqused_k does not count: just appended

  void* out = nullptr;  // like q, with head_dim_v
  Strides out_strides;
  float* lse = nullptr;  // (batch, heads_q, seqlen_q) or (heads_q, total_q); natural log
  int64_t lse_batch_stride = 0, lse_head_stride = 0;  // varlen: batch stride 0. Rows are contiguous
  // (heads_q) fp32, or null: not wanted. The largest softmax_scale · q·k that any query of the head
  // sees; -inf before the launch.
  float* max_logits = nullptr;

  // Workspace: one number, which the launch zeroes if nobody has who deals out sequences, or looks
  // for missing pages, in front of it.
  int32_t* tile_counter = nullptr;

  // > 1, with head_dim_v = head_dim, and a sink in varlen calls alone: each tile's keys are cut into
  // so many pieces, and their results, rows by token, are left for cuda::run_decode_combine; out and
  // lse are not written. There varlen sequences are one, of total_q queries.
  int num_splits = 1;
  PartialResults partial;
};

// dq_accum as a pool. The queries of a (batch entry, kv head) come in stretches of dq_accum_rows;
// those of a varlen sequence are one stretch, if that is long enough. The sums of stretch n of the
// call lie in place n % places, after those of stretch n - places have become rows of dq. So the
// stretches of a head lie one behind the other, but for the end of the pool, behind which its
// beginning comes.
struct DqPool {
  int places = 0;  // 0: no pool, dq_accum has room for all
  // Of a head. There is more than one only where windows are short and no heads share keys.
  int stretches = 1;
  float* end = nullptr;  // of dq_accum
  // Workspace (1 + 2 · batch · heads_kv · stretches), zeroed by the launch: how many shares of dq
  // have been taken on; then, for each stretch, how many blocks of keys have been added, where no
  // turns say so, and how many shares written.
  int32_t* progress = nullptr;
};

// The backward's tiles where whole ones would leave multiprocessors without work: the queries that
// see a block of keys are split among thread blocks, and their dK and dV meet in fp32.
struct BwdSplits {
  int count = 1;  // of each tile
  // Workspace, if there are several, in the order of bwd_split.cuh: gradients of keys, and counters
  // that the launch zeroes.
  int64_t num_sums = 0, num_arrivals = 0;
  float* sums = nullptr;
  int32_t* arrived = nullptr;
};

struct BwdParams : AttnParams {
  ScoreParams score;

  const void* out = nullptr;   // like q, with head_dim_v
  const void* dout = nullptr;  // like out
  Strides out_strides, dout_strides;
  const float* lse = nullptr;   // as in FwdParams
  const float* dlse = nullptr;  // the gradient that flows into lse, or null; laid out like lse
  int64_t lse_batch_stride = 0, lse_head_stride = 0;

  void *dq = nullptr, *dk = nullptr, *dv = nullptr;  // like q, k, v
  Strides dq_strides, dk_strides, dv_strides;
  bool wide_key_gradients = false;   // dk and dv are fp32
  bool wide_query_gradient = false;  // dq is fp32; then dq_accum has room for all sums
  float* dsink = nullptr;            // (heads_q), or null: not wanted
  BiasGradientParams dbias;

  // The call is one of several with the same queries and other keys each. delta is given, dq_accum
  // holds the sums of the calls before, and this one adds to them and leaves it at that: dq is null.
  bool is_part = false;
  static constexpr int kPartMultiple = 16;  // of the row at which the queries of a part begin

  float* delta = nullptr;  // workspace laid out like lse: rowsum(dO ∘ O) - dLSE
  // Workspace (heads_q, dq_accum_rows, dq_accum_cols), zeroed by the launch, in the order of
  // cuda/attn/dq_accum.cuh; null if dq is computed apart. As a pool: (places · group, …).
  float* dq_accum = nullptr;
  int64_t dq_accum_rows = 0;
  int64_t dq_accum_sequence_rows = 0;  // of a dense call, from one sequence to the next
  int dq_accum_cols = 0;               // those of dq, or of the head-dim class
  DqPool dq_pool;
  // Workspace (heads_q, dq_accum_rows / 16, 2 shares of the columns), with a pool (batch · heads_q,
  // …), zeroed by the launch. At the first row of each block of queries it says how many blocks of
  // keys have been added to its sums. If it is null, they are added in any order.
  int32_t* dq_turns = nullptr;
  BwdSplits splits;
  int32_t* tile_counter = nullptr;  // workspace: one number, zeroed by the launch; null: no need
  bool deterministic = false;
};

// A cache of keys and values, dense or paged. Its index vectors live on the device and may hold
// anything: an entry that names no row or page has no keys.
struct CacheParams {
  // (cache_rows, capacity, heads_kv, head_dim), or (cache_rows pages, page_size, heads_kv,
  // head_dim)
  const void* k_cache = nullptr;
  const void* v_cache = nullptr;     // likewise, with head_dim_v
  Strides k_strides, v_strides;      // batch: from one row of the cache, or page, to the next
  DType cache_dtype = DType::kFp16;  // that of q, kFp8E4M3 or kInt8
  int cache_rows = 0, capacity = 0;  // capacity: keys of one sequence; paged: pages · page_size
  int page_size = 0;                 // dense: capacity

  const int32_t* block_table = nullptr;  // (table_rows, max_pages), or null: dense
  int64_t table_stride = 0;
  int table_rows = 0;
  // (batch) row of the cache, or of block_table; null: the sequence
  const int32_t* cache_batch_idx = nullptr;
  const int32_t* cache_seqlens =
      nullptr;         // (batch) tokens before the appended ones; null: capacity
  int seqlen_new = 0;  // tokens appended by this call to every sequence

  // 8 bits: value = descale · what is stored; null: 1. Strides may be 0.
  const float *k_descale = nullptr, *v_descale = nullptr;
  int64_t k_descale_batch_stride = 0, k_descale_head_stride = 0;
  int64_t v_descale_batch_stride = 0, v_descale_head_stride = 0;

  // (rotary_rows, rotary_dim / 2) contiguous, dtype of q; null: no rotation. Row t turns position
  // t.
  const void *rotary_cos = nullptr, *rotary_sin = nullptr;
  int rotary_rows = 0, rotary_dim = 0;
  bool rotary_interleaved = false;  // pairs (0, 1), (2, 3), …; else (i, i + rotary_dim / 2)

  DType dtype = DType::kFp16;  // of q, out, and k, v to append
  int batch = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;

  // K and V share the class of the wider one.
  int widest_head_dim() const { return head_dim > head_dim_v ? head_dim : head_dim_v; }
};

struct AppendParams : CacheParams {
  const void *k = nullptr, *v = nullptr;  // (batch, seqlen_new, heads_kv, head_dim or head_dim_v)
  Strides k_new_strides, v_new_strides;
};

// How the keys of each sequence are cut into pieces, which thread blocks of their own read and
// whose results are merged. The functions below name the modes; a number that a mode does not use
// is 0.
struct Splits {
  int count = 0;  // pieces of a sequence; by length: at most so many
  int keys = 0;   // of a piece, by length
  // Where sequences are cut by length, these count the pieces of the whole call. Pieces become
  // shorter than `keys` where there would be fewer than least_pieces, which fill the device, and
  // longer where there would be more than most_pieces and one for each sequence. If most_pieces is
  // 0, they keep `keys`.
  int least_pieces = 0, most_pieces = 0;
  // The pieces of a sequence are merged in the same order whatever the other sequences.
  bool in_any_batch = false;

  // The keys of the whole call are dealt out evenly, whatever the lengths.
  static constexpr Splits dealt_out() { return {}; }
  // Each sequence into so many equal pieces; 1: not cut.
  static constexpr Splits alike(int pieces, bool in_any_batch = false) {
    return {.count = pieces, .in_any_batch = in_any_batch};
  }
  // Into pieces of so many keys, of sequences that have at most `pieces` of them: no bit of a
  // result depends on the other sequences.
  static constexpr Splits by_length(int keys, int pieces) {
    return {.count = pieces, .keys = keys, .in_any_batch = true};
  }
  // The same, with longer or shorter pieces where there would be too many or too few of them.
  static constexpr Splits by_length(int keys, int pieces, int least_pieces, int most_pieces) {
    return {.count = pieces,
            .keys = keys,
            .least_pieces = least_pieces,
            .most_pieces = most_pieces,
            .in_any_batch = true};
  }
};

// A call is plain if its cache has q's dtype or 8 bits, and if there is no softcap, no slopes, no
// bias, and nothing to rotate.
struct DecodeParams : CacheParams {
  ScoreParams score;

  const void* q = nullptr;  // (batch, seqlen_q, heads_q, head_dim): the newest tokens
  Strides q_strides;
  int heads_q = 0, seqlen_q = 0;
  int group = 0;                       // heads_q / heads_kv; group · seqlen_q < 2^20
  const int32_t* leftpad_k = nullptr;  // (batch) or null: keys to skip at the front

  float softmax_scale = 0;
  int window_left = -1, window_right = -1;  // as in AttnParams, bottom-right
  bool rotate_by_row = false;  // query i rotates by its own position; else all by that of the first

  Splits splits;  // dealt out: by cuda/decode/kvcache.cuh alone

  // (batch) or null, of calls on pages that are not cut. A sequence whose entry is 0 is left to
  // other kernels.
  const int32_t* sequence_mask = nullptr;

  PartialResults partial;  // null where nothing is cut

  void* out = nullptr;  // like q, with head_dim_v
  Strides out_strides;
  float* lse = nullptr;         // (batch, heads_q, seqlen_q) contiguous, or null
  float* max_logits = nullptr;  // as in FwdParams
};

// The keys of a paged cache that count, sequence after sequence, as the forward reads varlen ones.
struct PackedCache {
  void *k = nullptr, *v = nullptr;  // (rows, heads_kv, head_dim or head_dim_v) contiguous
  int64_t rows = 0;                 // that there is room for
  int32_t* cu_seqlens = nullptr;    // (batch + 1)
  int32_t* seqused =
      nullptr;  // (batch) 0 for a sequence that is not whole: no room, or a page missing
  int32_t* missed = nullptr;  // (batch) 1 for such a sequence
};

}  // namespace flash_attn
