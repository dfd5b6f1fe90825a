// A build without nvcc: core/backend.cpp never chooses these, so reaching one is a bug that should
// say so.
#include <stdexcept>

#include "../cuda/bwd.h"
#include "../cuda/cache/append.h"
#include "../cuda/cache/gather.h"
#include "../cuda/cache/rotate_queries.h"
#include "../cuda/decode/decode.h"
#include "../cuda/decode/kvcache.h"
#include "../cuda/decode/prefix.h"
#include "../cuda/few_queries.h"
#include "../cuda/key_mask.h"
#include "../cuda/operand_rows.h"
#include "../cuda/score_tile.h"
#include "../cuda/side_stream.h"
#include "../sm80/bwd.h"
#include "../sm80/fwd.h"
#include "../sm90/bwd.h"
#include "../sm90/fwd.h"
#include "../sm90/latent.h"

namespace flash_attn {
namespace {
[[noreturn]] void not_built() {
  throw std::runtime_error("flash_attn: this build has no CUDA kernels");
}
}  // namespace

const cuda::DeviceInfo& cuda::device_info(int) {
  static constexpr DeviceInfo kNone = {};
  return kNone;
}
void cuda::run_decode(const DecodeParams&, Stream) { not_built(); }
void cuda::run_decode_combine(const DecodeParams&, Stream) { not_built(); }
void cuda::run_decode_shared(const DecodeParams&, const SharedPrefix&, Stream) { not_built(); }
void cuda::run_kvcache(const DecodeParams&, const KvcacheGrid&, Stream) { not_built(); }
void cuda::run_append(const AppendParams&, Stream) { not_built(); }
void cuda::run_rotate_queries(const DecodeParams&, void*, Stream) { not_built(); }
void cuda::run_gather_pages(const DecodeParams&, const PackedCache&, const DeviceInfo&, Stream) {
  not_built();
}
void cuda::run_deal_long(const FwdParams&, int, const LongSequences&, Stream) { not_built(); }
void cuda::run_list_tiles(const FwdParams&, const TileList&, Stream) { not_built(); }
void cuda::run_gather_queries(const FwdParams&, const EvenQueries&, Stream) { not_built(); }
void cuda::run_scatter_results(const FwdParams&, const EvenResults&, Stream) { not_built(); }
void cuda::run_softmax_step(const ScoreTile&, const SoftmaxStep&, Stream) { not_built(); }
void cuda::run_gradient_step(const ScoreTile&, const GradientStep&, Stream) { not_built(); }
void cuda::run_probabilities(const ScoreTile&, const void*, const void*, const TensorPart&,
                             Stream) {
  not_built();
}
void cuda::run_finish_rows(const ScoreTile&, const RowResults&, Stream) { not_built(); }
void cuda::run_keep_finite(const Rows&, void*, uint8_t*, Stream) { not_built(); }
void cuda::run_restore(const ScoreTile&, const Restore&, Stream) { not_built(); }
void cuda::run_retake(const ScoreTile&, const Retake&, Stream) { not_built(); }
void cuda::run_row_delta(const Rows&, const TensorPart&, const TensorPart&, DType, void*, Stream) {
  not_built();
}
cuda::SideStream::SideStream(Stream) { not_built(); }
cuda::SideStream::~SideStream() = default;
Stream cuda::SideStream::stream() const { not_built(); }
void cuda::SideStream::join() { not_built(); }
void sm80::run_fwd(const FwdParams&, const cuda::DeviceInfo&, Stream) { not_built(); }
void sm80::run_bwd(const BwdParams&, const cuda::DeviceInfo&, Stream) { not_built(); }
void cuda::run_find_hidden(const AttnParams&, const BiasParams&, int32_t*, int32_t*, Stream) {
  not_built();
}
void cuda::run_find_missing_pages(const FwdParams&, int32_t*, int32_t*, int32_t*, Stream) {
  not_built();
}
void cuda::run_clear_pages(void*, int64_t, void*, int64_t, const bool*, int64_t, Stream) {
  not_built();
}
void sm80::run_fwd_of_sequences(const OfSequences<FwdParams>&, Stream) { not_built(); }
void sm80::run_bwd_of_sequences(const OfSequences<BwdParams>&, Stream) { not_built(); }
void sm80::run_fwd_masked(const Masked<FwdParams>&, Stream) { not_built(); }
void sm80::run_bwd_masked(const Masked<BwdParams>&, Stream) { not_built(); }
void sm80::run_bwd_bias(const BwdParams&, Stream) { not_built(); }
int64_t cuda::bwd_dq_accum_sequence_rows(const AttnParams&) { not_built(); }
int64_t cuda::bwd_dq_accum_rows(const BwdParams&) { not_built(); }
void cuda::run_bwd_delta(const BwdParams&, Stream) { not_built(); }
int64_t cuda::bwd_dq_turns(const BwdParams&) { not_built(); }
int64_t cuda::bwd_dq_pool_progress(const BwdParams&) { not_built(); }
void sm80::run_bwd_dq_of_parts(const BwdParams&, Stream) { not_built(); }
int sm80::bwd_dq_accum_cols(const BwdParams&, bool) { not_built(); }
void sm90::run_bwd(const BwdParams&, const cuda::DeviceInfo&, Stream) { not_built(); }
void sm90::run_bwd_dq_of_parts(const BwdParams&, Stream) { not_built(); }
void sm90::run_bwd_bias(const BwdParams&, const cuda::DeviceInfo&, Stream) { not_built(); }
bool sm90::stores_bias_gradient(const BwdParams&) { not_built(); }
bool sm90::computes_bias_gradient(const BwdParams&) { not_built(); }
void sm90::run_bwd_masked(const Masked<BwdParams>&, int32_t*, const cuda::DeviceInfo&, Stream) {
  not_built();
}
bool sm90::computes_dq_apart(const BwdParams&, const cuda::DeviceInfo&) { not_built(); }
int sm90::bwd_dq_accum_cols(const BwdParams&, bool) { not_built(); }
DqPool sm90::bwd_dq_pool(const BwdParams&, const cuda::DeviceInfo&, bool) { not_built(); }
int64_t sm90::bwd_dq_pool_rows(const BwdParams&, const DqPool&) { not_built(); }
BwdSplits sm90::bwd_splits(const BwdParams&, const cuda::DeviceInfo&) { not_built(); }
bool sm90::writes_wide_key_gradients(const BwdParams&) { not_built(); }
int64_t sm90::mask_order_size(const Masked<FwdParams>&) { not_built(); }
int64_t sm90::mask_order_size(const Masked<BwdParams>&) { not_built(); }
void sm90::run_fwd(const FwdParams&, const cuda::DeviceInfo&, Stream) { not_built(); }
void sm90::run_latent(const DecodeParams&, const KvcacheGrid&, Stream) { not_built(); }
void sm90::run_fwd_in_pieces(const FwdInPieces&, const cuda::DeviceInfo&, Stream) { not_built(); }
void sm90::run_fwd_masked(const Masked<FwdParams>&, int32_t*, const cuda::DeviceInfo&, Stream) {
  not_built();
}

}  // namespace flash_attn
