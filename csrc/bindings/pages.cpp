#include "pages.h"

#include "families.h"
#include "few_queries.h"

namespace flash_attn {
namespace {

// Shapes and dtypes that any call with a block_table has.
bool are_pages(const AttnArgs& args) {
  const auto& [q, k, v] = std::tie(args.q, args.k, args.v);
  const at::Tensor& table = *args.block_table;
  return args.is_varlen() && !args.cu_seqlens_k && args.seqused_k && q.dim() == 3 && k.dim() == 4 &&
         v.dim() == 4 && k.size(0) == v.size(0) && k.size(1) == v.size(1) &&
         k.size(2) == v.size(2) && k.size(2) > 0 && q.size(1) % k.size(2) == 0 &&
         q.size(2) == k.size(3) && k.scalar_type() == q.scalar_type() &&
         v.scalar_type() == q.scalar_type() && k.device() == q.device() &&
         v.device() == q.device() && table.device() == q.device() && table.dim() == 2 &&
         table.scalar_type() == at::kInt && args.cu_seqlens_q->dim() == 1 &&
         table.size(0) + 1 == args.cu_seqlens_q->size(0);
}

}  // namespace

bool fits_boxes(int64_t page_size, int window_left, bool top_left) {
  const bool has_window = window_left >= 0;
  return page_size % PageTable::kMultiple == 0 &&
         (!has_window || (window_left + 1 >= PageTable::kMultiple && !top_left));
}

bool reads_pages(const FwdArgs& args) {
  const AttnArgs& attn = args.attn;
  if (!attn.block_table || gpu_of(attn.q) == nullptr || !are_pages(attn)) return false;
  if (const auto few = few_queries_call(args); few && few->serves_all) return true;
  constexpr int64_t kMostKeys = int64_t{1} << 30;
  const int64_t page_size = attn.k.size(1), room = attn.block_table->size(1) * page_size;
  if (attn.k.numel() == 0 || attn.v.numel() == 0 || room == 0 || room >= kMostKeys ||
      !fits_boxes(page_size, window_to_params(attn.window_left), attn.top_left) || attn.leftpad_k ||
      attn.attn_bias || attn.mask_tiles ||
      (args.backend && *args.backend != name(Backend::kSm90))) {
    return false;
  }
  const CallShape call = call_shape(args);
  // Sequences that lack a page may be left to sm80's kernels.
  return call.portable_code() != 0 && plan_call(families(), call, {}).backend == Backend::kSm90 &&
         is_readable(attn.k) && is_readable(attn.v);
}

void fill_pages(FwdParams& params, const AttnArgs& args) {
  const at::Tensor& table = *args.block_table;
  params.pages = {.entries = table.const_data_ptr<int32_t>(),
                  .row_stride = table.size(1),
                  .page_size = static_cast<int>(args.k.size(1)),
                  .num_pages = static_cast<int>(args.k.size(0))};
  params.seqlen_k = static_cast<int>(table.size(1)) * params.pages.page_size;
  params.cache_rows = params.batch;
}

}  // namespace flash_attn
