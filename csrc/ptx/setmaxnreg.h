// setmaxnreg: moves registers between the warpgroups of a block (PTX ISA, "setmaxnreg").
// The register count at entry must be known: __launch_bounds__(threads, 1).
#pragma once

namespace flash_cuda::ptx {

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_cuda::ptx
