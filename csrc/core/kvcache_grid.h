// How a call of cuda/decode/kvcache.cuh is spread over the device.
#pragma once

namespace flash_attn {

struct KvcacheGrid {
  int parts = 0;  // that all keys are cut into, for each kv head
  int blocks_per_sm = 0;
  int smem_bytes = 0;        // that a block may use
  int smem_optin_bytes = 0;  // of DeviceInfo
};

}  // namespace flash_attn
