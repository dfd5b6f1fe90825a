// A second stream for the time of a call.
#pragma once

#include "../core/params.h"

namespace flash_attn::cuda {

struct KeptStream;

// What is launched on it may run beside what is launched on the caller's stream meanwhile. Where
// thread blocks of both wait for room on the GPU, its own come first. Works in a CUDA graph.
class SideStream {
 public:
  // Begins behind all that is on `main` by now.
  explicit SideStream(Stream main);
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  // Joins, if an error kept the call from it: memory that both used is then free for `main` again.
  ~SideStream();

  Stream stream() const;
  // What is launched on `main` from here on waits for all of this stream.
  void join();

 private:
  Stream main_;
  KeptStream* kept_;
  bool is_joined_ = false;
};

}  // namespace flash_attn::cuda
