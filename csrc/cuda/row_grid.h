// The grid of a kernel that visits each row of q (out, dq, lse) of each head once.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../core/params.h"

namespace flash_attn::cuda {

// blockIdx.x counts blocks of rows over all batch entries (varlen: one entry of total_q rows),
// blockIdx.y starts the heads: no 64-bit division in the kernel.
struct RowGrid {
  int64_t rows_per_batch;
  unsigned blocks_per_batch;
  dim3 blocks;

  RowGrid(const AttnParams& params, int rows_per_block)
      : rows_per_batch(params.cu_seqlens_q == nullptr ? params.seqlen_q : params.total_q),
        blocks_per_batch(
            static_cast<unsigned>((rows_per_batch + rows_per_block - 1) / rows_per_block)),
        blocks(blocks_per_batch * (params.cu_seqlens_q == nullptr ? params.batch : 1),
               std::min(params.heads_q, 65535)) {}
};

}  // namespace flash_attn::cuda
