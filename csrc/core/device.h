// What the choice of a kernel and its launch need to know of a GPU.
#pragma once

namespace flash_attn {

struct DeviceInfo {
  int compute_capability = 0;  // 10 · major + minor
  int num_sms = 0;
  int smem_optin_bytes = 0;  // the most shared memory a block can ask for
};

}  // namespace flash_attn
