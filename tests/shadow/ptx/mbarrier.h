// Stand-in for compute capability 9.0: the lanes of an issuing warp arrive as one thread.
#pragma once

#define mbarrier_arrive mbarrier_arrive_of_thread
#include "../../../csrc/ptx/mbarrier.h"
#undef mbarrier_arrive
#include "ptx/elect.h"

namespace flash_cuda::ptx {

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  if (threadIdx.x % 32 == 0 || !shadow_is_issuer()) mbarrier_arrive_of_thread(bar);
}

}  // namespace flash_cuda::ptx
