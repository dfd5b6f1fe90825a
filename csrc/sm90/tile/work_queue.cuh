// What a thread block works on, tile after tile: one warp takes tiles and describes them, all
// others read the descriptions.
#pragma once

#include <new>

#include "ring.cuh"

namespace flash_attn::sm90 {

template <typename Work, int kStages>
struct WorkQueue {
  struct Stage {
    bool end;  // no work: all is done
    alignas(Work) unsigned char storage[sizeof(Work)];

    __device__ __forceinline__ const Work& work() const {
      return *reinterpret_cast<const Work*>(storage);
    }
    __device__ __forceinline__ Work& work() { return *reinterpret_cast<Work*>(storage); }
  };
  Stage stages[kStages];
  RingBarriers<kStages> ring;

  // One thread calls it, before a barrier among all threads. readers: how many threads release what
  // they have read.
  __device__ __forceinline__ void init(int readers) { ring.init(1, readers); }
};

// The end of the queue at which one warp writes. All its lanes wait together: a lane that waited
// alone would keep the others polling beside it.
template <typename Work, int kStages>
class WorkWriter {
 public:
  __device__ __forceinline__ explicit WorkWriter(WorkQueue<Work, kStages>& queue)
      : queue_(queue), ring_(queue.ring) {}

  // Returns what lies in the queue now, which the writer may read until the next push().
  __device__ __forceinline__ const Work& push(const Work& work) {
    const Work& pushed = draft(work);
    publish();
    return pushed;
  }
  // draft() and publish() are the two halves of push(). In between the first lane may change the
  // work.
  __device__ __forceinline__ Work& draft(const Work& work) {
    ring_.wait_empty();
    auto& stage = queue_.stages[ring_.stage()];
    if (threadIdx.x % 32 == 0) {
      stage.end = false;
      new (stage.storage) Work(work);
    }
    return stage.work();
  }
  __device__ __forceinline__ void publish() {
    if (threadIdx.x % 32 == 0) ring_.arrive_full();
    __syncwarp();
    ring_.advance();
  }
  __device__ __forceinline__ void end() {
    ring_.wait_empty();
    if (threadIdx.x % 32 == 0) {
      queue_.stages[ring_.stage()].end = true;
      ring_.arrive_full();
    }
  }

 private:
  WorkQueue<Work, kStages>& queue_;
  Ring<kStages> ring_;
};

// The end at which one thread reads. It takes a single register.
template <typename Work, int kStages>
class WorkReader {
 public:
  __device__ __forceinline__ explicit WorkReader(WorkQueue<Work, kStages>& queue) : queue_(queue) {}

  // Waits for the next work; null behind the last one.
  __device__ __forceinline__ const Work* read() const {
    Ring<kStages>(queue_.ring, visit_).wait_full();
    const auto& stage = queue_.stages[visit_ % kStages];
    return stage.end ? nullptr : &stage.work();
  }
  // The stage that goes with what was read, in a ring that is visited in step with the queue.
  template <int kRingStages>
  __device__ __forceinline__ Ring<kRingStages> in(RingBarriers<kRingStages>& barriers) const {
    return Ring<kRingStages>(barriers, visit_);
  }
  // The reader is done with it. `arrives`: in the one thread that says so for this reader.
  __device__ __forceinline__ void release(bool arrives) {
    if (arrives) Ring<kStages>(queue_.ring, visit_).arrive_empty();
    ++visit_;
  }

 private:
  WorkQueue<Work, kStages>& queue_;
  unsigned visit_ = 0;
};

}  // namespace flash_attn::sm90
