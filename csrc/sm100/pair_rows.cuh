// Copies of boxes of rows whose bytes complete on a barrier of either block of a pair.
#pragma once

#include "common/tma_rows.h"
#include "ptx/tcgen05_pair.h"

namespace flash_cuda::sm100 {

// From row `row` of the sequence on; rows past its end become zero.
__device__ __forceinline__ void load_rows_pair(uint32_t dst, const CUtensorMap* map, uint32_t bar,
                                               int column, int row, const MapRows& at,
                                               uint64_t policy) {
  if (at.clipped) {
    ptx::tma_load_5d_pair(dst, map, bar, column, at.row0 + row, at.c2, at.c3, kWrapSteps, policy);
  } else {
    ptx::tma_load_4d_pair(dst, map, bar, column, at.row0 + row, at.c2, at.c3, policy);
  }
}

}  // namespace flash_cuda::sm100
