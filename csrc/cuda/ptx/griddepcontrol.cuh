// Programmatic dependent launch: the next kernel of the stream starts while this one still runs.
#pragma once

namespace flash_attn::ptx {

// griddepcontrol.launch_dependents, PTX ISA "griddepcontrol", sm_90 and newer: the dependent grid
// may start once every block has said so or ended. Nothing before; the launch is a plain one there.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// griddepcontrol.wait: until the grids that this one depends on have ended and their writes are
// visible.
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash_attn::ptx
