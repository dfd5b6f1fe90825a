// Stages of shared memory that one side fills and the other empties, with a full and an empty
// mbarrier each.
#pragma once

#include <cstdint>

#include "../ptx/mbarrier.cuh"

namespace flash_attn::sm90 {

template <int kStages>
struct RingBarriers {
  uint64_t full[kStages], empty[kStages];

  // One thread calls it, before a barrier among all threads. arrivals: how many threads say that a
  // stage is full, or empty.
  __device__ __forceinline__ void init(int full_arrivals, int empty_arrivals) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full[stage], full_arrivals);
      ptx::mbarrier_init(empty[stage], empty_arrivals);
    }
  }
};

// Where one thread stands in a ring. Both sides visit the stages in the same order; `phase_` is the
// parity of the visit. A fresh barrier counts as having completed the visit before the first, so
// the first wait_empty of each stage passes.
template <int kStages>
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(RingBarriers<kStages>& barriers) : barriers_(barriers) {}
  // Begins at a later visit.
  __device__ __forceinline__ Ring(RingBarriers<kStages>& barriers, unsigned visit)
      : barriers_(barriers), stage_(visit % kStages), phase_(visit / kStages % 2) {}

  // The same stage of another ring of as many, which is visited in step with this one.
  __device__ __forceinline__ Ring in(RingBarriers<kStages>& barriers) const {
    Ring ring(barriers);
    ring.stage_ = stage_;
    ring.phase_ = phase_;
    return ring;
  }

  // The stage of the visit before this one.
  __device__ __forceinline__ Ring before() const {
    Ring ring(barriers_);
    ring.stage_ = stage_ == 0 ? kStages - 1 : stage_ - 1;
    ring.phase_ = stage_ == 0 ? phase_ ^ 1 : phase_;
    return ring;
  }

  // The stage of the visit after this one.
  __device__ __forceinline__ Ring after() const {
    Ring ring = *this;
    ring.advance();
    return ring;
  }

  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ uint64_t& full() const { return barriers_.full[stage_]; }
  __device__ __forceinline__ uint64_t& empty() const { return barriers_.empty[stage_]; }

  __device__ __forceinline__ void wait_full() const { ptx::mbarrier_wait(full(), phase_); }
  __device__ __forceinline__ void wait_empty() const { ptx::mbarrier_wait(empty(), phase_ ^ 1); }

  // Says whether the stage is full, without waiting for it.
  __device__ __forceinline__ bool is_full() const {
    return ptx::mbarrier_is_complete(full(), phase_);
  }

  // The stage is full (empty) as far as this thread is concerned.
  __device__ __forceinline__ void arrive_full() const { ptx::mbarrier_arrive(full()); }
  __device__ __forceinline__ void arrive_empty() const { ptx::mbarrier_arrive(empty()); }
  // The stage is full once so many bytes have come by TMA. It is called before the copies start.
  __device__ __forceinline__ void expect_bytes(uint32_t bytes) const {
    ptx::mbarrier_arrive_expect(full(), bytes);
  }

  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }
  // Goes to the next visit of the same stage.
  __device__ __forceinline__ void advance_round() { phase_ ^= 1; }

 private:
  RingBarriers<kStages>& barriers_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace flash_attn::sm90
