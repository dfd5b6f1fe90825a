#pragma once

#include <cstdint>
#include <cstring>

namespace flash_attn::ptx {

inline void start_copy(uint32_t smem_destination, const void* source, int source_bytes, int bytes) {
  void* const destination = simulator::shared_pointer(smem_destination);
  simulator::this_thread().copies.start([=] {
    std::memset(destination, 0, bytes);
    if (source_bytes > 0) std::memcpy(destination, source, source_bytes);
  });
}
inline void cp_async_16(uint32_t smem_destination, const void* source, int source_bytes) {
  start_copy(smem_destination, source, source_bytes, 16);
}
inline void cp_async_4(uint32_t smem_destination, const void* source, int source_bytes) {
  start_copy(smem_destination, source, source_bytes, 4);
}
inline void cp_async_commit() { simulator::this_thread().copies.commit(); }
template <int kPending>
void cp_async_wait() {
  simulator::this_thread().copies.wait(kPending);
}

}  // namespace flash_attn::ptx
