// What the producer warps of the backward kernel for wide heads load.
#pragma once

#include "bwd_pair_traits.cuh"
#include "bwd_producer.cuh"
#include "ptx/fence.cuh"

namespace flash_attn::sm90 {

// Loads the slabs of a block of keys that have num_cols columns from first_col on. One thread calls
// it, which has announced slab_bytes().
template <typename Slab, int kSlabs>
__device__ __forceinline__ void load_slabs(Slab (&slabs)[kSlabs], const CUtensorMap& map,
                                           const BwdWork& work, int first_key, int first_col,
                                           int num_cols, uint64_t& mbarrier) {
  for (int s = 0; s * Slab::kCols < num_cols && s < kSlabs; ++s) {
    load_tile(slabs[s], map, work.kv, first_key, Slab::kCols, mbarrier, ptx::CacheHint::kEvictFirst,
              first_col + s * Slab::kCols);
  }
}
template <typename Slab, int kSlabs>
__device__ __forceinline__ uint32_t slab_bytes(const Slab (&)[kSlabs], int num_cols) {
  return min((num_cols + Slab::kCols - 1) / Slab::kCols, kSlabs) * sizeof(Slab);
}

// Loads kSlabs slabs of a block of Q or dO. Where the matrix lacks a slab, its first one comes once
// more, to be multiplied with the zeros of K or V. One thread calls it.
template <int kSlabs, int kStages, typename Slab>
__device__ __forceinline__ void load_query_slabs(Slab (&slabs)[kStages], const CUtensorMap& map,
                                                 const BwdWork& work, const QueryBlock& block,
                                                 int num_cols, Ring<kStages>& ring) {
  const MatrixPlace place = {.box = work.q.box, .head = block.head, .batch = work.q.batch};
#pragma unroll 1
  for (int col = 0; col < kSlabs * Slab::kCols; col += Slab::kCols, ring.advance()) {
    ring.wait_empty();
    ring.expect_bytes(sizeof(Slab));
    load_tile(slabs[ring.stage()], map, place, block.m * Slab::kRows, Slab::kCols, ring.full(),
              ptx::CacheHint::kEvictLast, col < num_cols ? col : 0);
  }
}

// Where those who do not read LSE and delta learn of a tile's blocks of queries: all that its keys
// meet, or with a mask those that were found. of() is the walk of a thread that loads.
template <typename Traits, bool kMasked = Traits::kMasked>
class BlockSource {
 public:
  __device__ __forceinline__ explicit BlockSource(BwdPairSharedStorage<Traits>&) {}
  __device__ __forceinline__ QueryBlocks of(const BwdWork& work, bool /*reads*/) const {
    return QueryBlocks(work);
  }
};
template <typename Traits>
class BlockSource<Traits, true> {
 public:
  __device__ __forceinline__ explicit BlockSource(BwdPairSharedStorage<Traits>& smem)
      : smem_(smem), ring_(smem.mask.ring) {}

  class Walk {
   public:
    __device__ __forceinline__ Walk(BlockSource& source, bool more) : source_(source), more_(more) {
      if (more_) queries_ = source_.read();
    }
    __device__ __forceinline__ operator QueryBlock() const { return queries_.block(); }
    __device__ __forceinline__ bool more() const { return more_; }
    __device__ __forceinline__ void advance() {
      more_ = !queries_.is_last();
      if (more_) queries_ = source_.read();
    }

   private:
    BlockSource& source_;
    bool more_;
    FoundQueries queries_;
  };
  // reads: in the one thread that walks.
  __device__ __forceinline__ Walk of(const BwdWork& work, bool reads) {
    return Walk(*this, reads && work.has_queries());
  }

  // The next block, for one thread; or for a warp, of which one lane reads.
  __device__ __forceinline__ FoundQueries read() {
    ring_.wait_full();
    const FoundQueries queries = smem_.mask.found[ring_.stage()];
    ring_.arrive_empty();
    ring_.advance();
    return queries;
  }
  __device__ __forceinline__ FoundQueries read_by_warp(int lane) {
    ring_.wait_full();
    FoundQueries queries;
    if (lane == 0) {
      queries = smem_.mask.found[ring_.stage()];
      ring_.arrive_empty();
    }
    ring_.advance();
    return queries.of_first_lane();
  }

 private:
  BwdPairSharedStorage<Traits>& smem_;
  Ring<BwdPairMaskStorage<Traits>::kFound> ring_;
};

// Loads Q or dO of the blocks of queries of all tiles. load_keys(work, speaks) loads what stays for
// a tile, whose place is empty later than that of the first block of queries. A whole warp calls
// it, of which one thread speaks.
template <int kSlabs, int kStages, typename Traits, typename LoadKeys>
__device__ __forceinline__ void load_slabs_loop(typename Traits::Slab (&slabs)[kStages],
                                                RingBarriers<kStages>& barriers,
                                                const CUtensorMap& map, int num_cols,
                                                BwdPairSharedStorage<Traits>& smem,
                                                const LoadKeys& load_keys) {
  WorkReader queue(smem.queue);
  Ring<kStages> ring(barriers);
  BlockSource<Traits> blocks(smem);
  const bool speaks = ptx::elect_one();
#pragma unroll 1
  while (const BwdWork* const work = queue.read()) {
    auto block = blocks.of(*work, speaks);
    if (speaks && block.more()) {
      load_query_slabs<kSlabs>(slabs, map, *work, block, num_cols, ring);
      block.advance();
    }
    __syncwarp();
    load_keys(*work, speaks);
    if (speaks) {
#pragma unroll 1
      for (; block.more(); block.advance()) {
        load_query_slabs<kSlabs>(slabs, map, *work, block, num_cols, ring);
      }
    }
    __syncwarp();
    queue.release(true);
  }
}

// Slabs that this tile loads nothing into must not keep what the last tile left there.
template <typename Slab, int kSlabs>
__device__ __forceinline__ void zero_unless_loaded(Slab (&slabs)[kSlabs], int num_cols) {
  if (num_cols == 0) zero_slabs<32>(slabs, 0, threadIdx.x % 32);
}

// A stage of K or V is full when all lanes have said so, and the bytes have come that one
// announces.
__device__ __forceinline__ void arrive_full(const Ring<1>& ring, bool speaks, uint32_t bytes) {
  ptx::fence_async_shared();
  if (speaks) {
    ring.expect_bytes(bytes);
  } else {
    ring.arrive_full();
  }
}

// The warp for K and Q.
template <typename Traits>
__device__ __forceinline__ void load_k_and_queries_loop(const BwdParams& params,
                                                        const BwdTensorMaps& maps,
                                                        BwdPairSharedStorage<Traits>& smem,
                                                        int rank) {
  Ring<1> ring(smem.k_ring);
  const auto load_keys = [&](const BwdWork& work, bool speaks) {
    const BwdPairKeys<Traits> keys(params, work, rank);
    ring.wait_empty();
    zero_unless_loaded(smem.k, keys.k_cols);
    if constexpr (Traits::kHasDq) zero_unless_loaded(smem.peer_k, keys.peer_k_cols);
    arrive_full(ring, speaks,
                slab_bytes(smem.k, keys.k_cols) + slab_bytes(smem.peer_k, keys.peer_k_cols));
    if (speaks) {
      load_slabs(smem.k, maps.k, work, keys.first_key, 0, keys.k_cols, ring.full());
      load_slabs(smem.peer_k, maps.k, work, keys.peer_first_key, keys.first_peer_col(rank),
                 keys.peer_k_cols, ring.full());
    }
    ring.advance();
  };
  load_slabs_loop<Traits::kSlabs>(smem.q, smem.q_ring, maps.q, params.head_dim, smem, load_keys);
}

// The warp for V and dO.
template <typename Traits>
__device__ __forceinline__ void load_v_and_gradients_loop(const BwdParams& params,
                                                          const BwdTensorMaps& maps,
                                                          BwdPairSharedStorage<Traits>& smem,
                                                          int rank) {
  Ring<1> ring(smem.v_ring);
  const auto load_keys = [&](const BwdWork& work, bool speaks) {
    const BwdPairKeys<Traits> keys(params, work, rank);
    ring.wait_empty();
    zero_unless_loaded(smem.v, keys.v_cols);
    arrive_full(ring, speaks, slab_bytes(smem.v, keys.v_cols));
    if (speaks) {
      load_slabs(smem.v, maps.v, work, keys.first_key, 0, keys.v_cols, ring.full());
    }
    ring.advance();
  };
  load_slabs_loop<Traits::kSlabsV>(smem.dout, smem.dout_ring, maps.dout, params.head_dim_v, smem,
                                   load_keys);
}

// Takes tiles for the thread blocks of a cluster, from a counter that all clusters share: the first
// one takes, and tells the other. A whole warp calls it in each.
template <typename Traits>
class TileTaker {
 public:
  __device__ __forceinline__ TileTaker(const BwdParams& params, BwdPairSharedStorage<Traits>& smem,
                                       int rank)
      : params_(params), smem_(smem), ring_(smem.number_ring), rank_(rank) {}

  __device__ __forceinline__ int take() {
    const bool speaks = threadIdx.x % 32 == 0;
    TileNumber& number = smem_.numbers[ring_.stage()];
    if (rank_ == 0) {
      int taken = 0;
      if (speaks) taken = atomicAdd(params_.tile_counter, 1);
      if constexpr (Traits::kBlocks > 1) {
        ring_.wait_empty();
        if (speaks) {
          number.number = taken;
          ptx::fence_async_shared();
          ptx::copy_to_block(at_peer(&number), &number, sizeof(number), at_peer(&ring_.full()));
        }
        ring_.advance();
      }
      return __shfl_sync(~0u, taken, 0);
    }
    if (speaks) ring_.expect_bytes(sizeof(number));
    ring_.wait_full();
    const int told = __shfl_sync(~0u, number.number, 0);
    // The exchange has waited for the read, which the arrival does not order.
    if (speaks) ptx::mbarrier_arrive_remote(at_peer(&ring_.empty()));
    ring_.advance();
    return told;
  }

 private:
  __device__ __forceinline__ uint32_t at_peer(const void* here) const {
    return ptx::address_in_block(flash_attn::ptx::smem_address(here), rank_ ^ 1);
  }

  const BwdParams& params_;
  BwdPairSharedStorage<Traits>& smem_;
  Ring<Traits::kStages> ring_;
  int rank_;
};

template <typename Traits>
__device__ __forceinline__ RowScales row_scales(const BwdParams& params) {
  return {.p = kExactScale,
          .delta = Traits::kFoldsRows ? 1 : 1 / kExactScale,
          .scale_log2 = Traits::RowValues::scale_log2(params.softmax_scale)};
}

// Takes tiles and publishes them; loads LSE and delta. The next tile is taken before this one's
// last block is waited for: late, so that clusters end together, but early enough for its first
// loads to hide behind the end of this one. A whole warp calls it.
template <typename Traits>
__device__ __forceinline__ void schedule_and_load_row_values_loop(
    const BwdParams& params, const typename Traits::Scheduler& scheduler, int num_tiles,
    BwdPairSharedStorage<Traits>& smem, int rank) {
  const RowScales scales = row_scales<Traits>(params);
  TileTaker<Traits> tiles(params, smem, rank);
  WorkWriter queue(smem.queue);
  Ring<Traits::kStages> ring(smem.row_ring);
  int number = tiles.take();
#pragma unroll 1
  while (number < num_tiles) {
    const TileCoordinates tile = scheduler.tile(number);
    const SeqlenInfo seqlen(params, tile.batch_idx);
    int next = -1;                                         // not taken yet
    if (tile.block * Traits::kPairN < seqlen.segment_k) {  // for both thread blocks
      BwdWork described = BwdWork::make<Traits::kBlockM, Traits::kPairN>(params, tile, seqlen);
      described.first_key += rank * Traits::kBlockN;  // of the thread block; the rest is the pair's
      const BwdWork& work = queue.push(described);
      load_row_values<Traits::kBlockM>(
          params, work, smem.row_values, ring, scales,
          [&](const QueryBlocks& block, bool /*new_head*/, const auto& /*ring*/) {
            if (block.is_last()) next = tiles.take();
          });
    }
    number = next >= 0 ? next : tiles.take();
  }
  queue.end();
}

}  // namespace flash_attn::sm90
