// Functions that the host and the device share, in headers that both compilers read.
#pragma once

#ifdef __CUDACC__
#define FLASH_ATTN_HOST_DEVICE __host__ __device__
#else
#define FLASH_ATTN_HOST_DEVICE
#endif
