#include "side_stream.h"

#include <mutex>
#include <vector>

#include "launch.h"

namespace flash_attn::cuda {

// Of a device. It belongs to one call at a time.
struct KeptStream {
  int device;
  cudaStream_t stream;
  cudaEvent_t forked, joined;
};

namespace {

constexpr unsigned long long kNoGraph = 0, kBrokenGraph = ~0ull;

// The graph that the stream is being captured into.
unsigned long long graph_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  unsigned long long graph = kNoGraph;
  FLASH_ATTN_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &graph));
  if (status == cudaStreamCaptureStatusInvalidated) return kBrokenGraph;
  return status == cudaStreamCaptureStatusActive ? graph : kNoGraph;
}

// To make a stream is no part of a graph that this thread captures.
class NotCaptured {
 public:
  NotCaptured() { exchange(); }
  ~NotCaptured() { exchange(); }

 private:
  void exchange() { cudaThreadExchangeStreamCaptureMode(&mode_); }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

KeptStream* make_stream(int device) {
  const NotCaptured not_captured;
  KeptStream made = {.device = device};
  int lowest = 0, highest = 0;
  FLASH_ATTN_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  FLASH_ATTN_CUDA_CHECK(cudaStreamCreateWithPriority(&made.stream, cudaStreamNonBlocking, highest));
  FLASH_ATTN_CUDA_CHECK(cudaEventCreateWithFlags(&made.forked, cudaEventDisableTiming));
  FLASH_ATTN_CUDA_CHECK(cudaEventCreateWithFlags(&made.joined, cudaEventDisableTiming));
  return new KeptStream(made);
}

// Streams that no call has. They are never destroyed: at the end of a process CUDA may be gone
// before they are.
class IdleStreams {
 public:
  // A stream stays in a graph until its capture ends, also when its call has ended. So it may be
  // given to calls of that graph alone.
  KeptStream* take(Stream main) {
    int device = 0;
    FLASH_ATTN_CUDA_CHECK(cudaGetDevice(&device));
    const unsigned long long graph = graph_of(main);
    const std::lock_guard lock(mutex_);
    for (auto idle = idle_.begin(); idle != idle_.end(); ++idle) {
      KeptStream* const kept = *idle;
      if (kept->device != device) continue;
      const unsigned long long own = graph_of(kept->stream);
      if (own != kNoGraph && own != graph) continue;
      idle_.erase(idle);
      return kept;
    }
    return make_stream(device);
  }

  void give_back(KeptStream* kept) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(kept);
  }

 private:
  std::mutex mutex_;
  std::vector<KeptStream*> idle_;
};

IdleStreams& idle_streams() {
  static auto* const streams = new IdleStreams;
  return *streams;
}

}  // namespace

SideStream::SideStream(Stream main) : main_(main), kept_(idle_streams().take(main)) {
  try {
    FLASH_ATTN_CUDA_CHECK(cudaEventRecord(kept_->forked, main_));
    FLASH_ATTN_CUDA_CHECK(cudaStreamWaitEvent(kept_->stream, kept_->forked));
  } catch (...) {
    idle_streams().give_back(kept_);
    throw;
  }
}

SideStream::~SideStream() {
  if (!is_joined_ && cudaEventRecord(kept_->joined, kept_->stream) == cudaSuccess) {
    cudaStreamWaitEvent(main_, kept_->joined);
  }
  idle_streams().give_back(kept_);
}

Stream SideStream::stream() const { return kept_->stream; }

void SideStream::join() {
  FLASH_ATTN_CUDA_CHECK(cudaEventRecord(kept_->joined, kept_->stream));
  FLASH_ATTN_CUDA_CHECK(cudaStreamWaitEvent(main_, kept_->joined));
  is_joined_ = true;
}

}  // namespace flash_attn::cuda
