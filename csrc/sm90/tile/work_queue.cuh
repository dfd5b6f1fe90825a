// What a thread block works on, tile after tile: one warp takes tiles and describes them, all others
// read the descriptions.
#pragma once

#include <new>

#include "ring.cuh"

namespace flash_attn::sm90 {

template <typename Work, int kSlots>
struct WorkQueue {
  struct Slot {
    bool end;  // no work: all is done
    alignas(Work) unsigned char storage[sizeof(Work)];

    __device__ __forceinline__ const Work& work() const {
      return *reinterpret_cast<const Work*>(storage);
    }
    __device__ __forceinline__ Work& work() { return *reinterpret_cast<Work*>(storage); }
  };
  Slot slots[kSlots];
  RingBarriers<kSlots> ring;

  // One thread calls it, before a barrier among all threads. readers: how many threads release what
  // they have read.
  __device__ __forceinline__ void init(int readers) { ring.init(1, readers); }
};

// The end of the queue at which one warp writes. All its lanes wait together: a lane that waited
// alone would keep the others polling beside it.
template <typename Work, int kSlots>
class WorkWriter {
 public:
  __device__ __forceinline__ explicit WorkWriter(WorkQueue<Work, kSlots>& queue)
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
    auto& slot = queue_.slots[ring_.stage()];
    if (threadIdx.x % 32 == 0) {
      slot.end = false;
      new (slot.storage) Work(work);
    }
    return slot.work();
  }
  __device__ __forceinline__ void publish() {
    if (threadIdx.x % 32 == 0) ring_.arrive_full();
    __syncwarp();
    ring_.advance();
  }
  __device__ __forceinline__ void end() {
    ring_.wait_empty();
    if (threadIdx.x % 32 == 0) {
      queue_.slots[ring_.stage()].end = true;
      ring_.arrive_full();
    }
  }

 private:
  WorkQueue<Work, kSlots>& queue_;
  Ring<kSlots> ring_;
};

// The end at which one thread reads. It takes a single register.
template <typename Work, int kSlots>
class WorkReader {
 public:
  __device__ __forceinline__ explicit WorkReader(WorkQueue<Work, kSlots>& queue) : queue_(queue) {}

  // Waits for the next piece of work; null behind the last one.
  __device__ __forceinline__ const Work* read() const {
    Ring<kSlots>(queue_.ring, visit_).wait_full();
    const auto& slot = queue_.slots[visit_ % kSlots];
    return slot.end ? nullptr : &slot.work();
  }
  // The stage that goes with what was read, in a ring that is visited in step with the queue.
  __device__ __forceinline__ Ring<kSlots> in(RingBarriers<kSlots>& barriers) const {
    return Ring<kSlots>(barriers, visit_);
  }
  // The reader is done with it. `arrives`: in the one thread that says so for this reader.
  __device__ __forceinline__ void release(bool arrives) {
    if (arrives) Ring<kSlots>(queue_.ring, visit_).arrive_empty();
    ++visit_;
  }

 private:
  WorkQueue<Work, kSlots>& queue_;
  unsigned visit_ = 0;
};

}  // namespace flash_attn::sm90
