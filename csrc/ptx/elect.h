// One thread of a warp (PTX ISA, "elect.sync").
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

// True for one thread of a converged warp. The compiler then knows that what follows is one
// thread's and needs no loop over threads around instructions of the copy and matrix units.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

}  // namespace flash_cuda::ptx
