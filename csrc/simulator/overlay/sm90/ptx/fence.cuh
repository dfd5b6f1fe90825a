#pragma once

namespace flash_attn::sm90::ptx {

// Copies and products read and write memory as threads do.
inline void fence_async_shared() {}
inline void fence_async_global() {}
inline void fence_mbarrier_init() {}

}  // namespace flash_attn::sm90::ptx
