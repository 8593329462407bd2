// A warp's arrival on an mbarrier.
#pragma once

#include "ptx/mbarrier.h"

namespace flash_cuda::sm100 {

// This warp's part of a barrier's count; every lane's writes to tensor memory are told of.
__device__ __forceinline__ void arrive_warp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

}  // namespace flash_cuda::sm100
