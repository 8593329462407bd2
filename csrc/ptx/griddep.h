// Programmatic dependent launch (PTX ISA, "griddepcontrol").
#pragma once

namespace flash_cuda::ptx {

// Waits until the grids this one depends on have finished and their writes are visible.
__device__ __forceinline__ void griddep_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the dependent grid start before this one ends.
__device__ __forceinline__ void griddep_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace flash_cuda::ptx
