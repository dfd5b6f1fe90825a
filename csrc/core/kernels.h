// The table of contents of the compiled kernels: one function a kernel family, params in, launched
// on the stream. Each throws std::runtime_error when the launch fails. None synchronises.
#pragma once

#include "params.h"

namespace flash_attn {

namespace cuda {
// What the launches need to know of a device; read once a device, then cached.
struct DeviceInfo {
  int compute_capability;  // 10 · major + minor
  int num_sms;
  int smem_optin_bytes;  // the most shared memory a block can ask for
};
const DeviceInfo& device_info(int device);

// What DecodeParams calls plain, in three steps. With pages, no head_dim above this: registers are
// short.
inline constexpr int kDecodePagedHeadDim = 192;
// How the keys are cut, so that the grid fills the device, where num_splits is 0. batch_invariant:
// by what the sequence alone decides.
void plan_decode(DecodeParams& params, bool batch_invariant, const DeviceInfo& device);
// Rows of partial_o and partial_lse; 0: none.
int64_t decode_workspace_rows(const DecodeParams& params);
// Any head dim up to 256.
void run_decode(const DecodeParams& params, Stream stream);
// The last step alone: merges num_splits > 1 partial results.
void run_decode_combine(const DecodeParams& params, Stream stream);

// How a call of the kernel for every form of cache is spread over the device.
struct KvcacheGrid {
  int parts;  // that all keys are cut into, for each kv head
  int blocks_per_sm;
  int smem_bytes;        // that a block may use
  int smem_optin_bytes;  // of DeviceInfo
};
KvcacheGrid kvcache_grid(const DecodeParams& params, const DeviceInfo& device);
inline constexpr int kKvcacheSlotRows = 16;
// Slots, of kKvcacheSlotRows rows, that partial_o and partial_lse hold.
int64_t kvcache_slots(const DecodeParams& params, const KvcacheGrid& grid);
// Keys of a piece where a result may not depend on the batch, for DecodeParams::keys_per_split.
inline constexpr int kInvariantKeys = 2048;
// Any head_dim and head_dim_v up to 256 that are multiples of 8 (8-bit caches: of 16).
void run_kvcache(const DecodeParams& params, const KvcacheGrid& grid, Stream stream);
// Writes the tokens; a run_kvcache with the same seqlen_new that follows on the stream overlaps it.
void run_append(const AppendParams& params, Stream stream);
// The queries, rotated to their positions: (batch, seqlen_q, heads_q, head_dim) contiguous.
void run_rotate_queries(const DecodeParams& params, void* rotated, Stream stream);
// Copies the keys that any query of a paged call sees, 16 bits each. What it leaves out, run_kvcache
// serves as `wanted`.
void run_gather_pages(const DecodeParams& params, const PackedCache& packed,
                      const DeviceInfo& device, Stream stream);
}  // namespace cuda

namespace sm80 {
// Any head_dim and head_dim_v up to 256 that are multiples of 8, fp16 and bf16.
void run_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);
void run_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// BwdParams::dq_accum: rows of one head, and floats in a row.
int64_t bwd_dq_accum_rows(const BwdParams& params);
int bwd_dq_accum_cols(const BwdParams& params);
}  // namespace sm80

namespace sm90 {
// Compute capability 9.0 only. Any head_dim and head_dim_v up to 256 that are multiples of 8, fp16
// and bf16; score terms.
void run_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);
}  // namespace sm90

}  // namespace flash_attn
