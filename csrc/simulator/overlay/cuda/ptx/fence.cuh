#pragma once

namespace flash_attn::ptx {

// Whatever one thread writes, all see at once.
inline void fence_acquire() {}
inline void fence_release() {}

}  // namespace flash_attn::ptx
