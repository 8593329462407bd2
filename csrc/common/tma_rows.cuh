// Copies of boxes whose rows are found by a RowMap. kMayClip: the map may be clipped.
#pragma once

#include "common/tma_rows.h"
#include "ptx/tma.h"

namespace flash_cuda {

// From row `row` of the sequence on; rows past its end become zero.
template <bool kMayClip = true>
__device__ __forceinline__ void load_rows(uint32_t dst, const CUtensorMap* map, uint32_t bar,
                                          int column, int row, const MapRows& at, uint64_t policy) {
  if (kMayClip && at.clipped) {
    ptx::tma_load_5d(dst, map, bar, column, at.row0 + row, at.c2, at.c3, kWrapSteps, policy);
  } else {
    ptx::tma_load_4d(dst, map, bar, column, at.row0 + row, at.c2, at.c3, policy);
  }
}

// The same into every thread block of `mask`.
template <bool kMayClip = true>
__device__ __forceinline__ void load_rows_multicast(uint32_t dst, const CUtensorMap* map,
                                                    uint32_t bar, int column, int row,
                                                    const MapRows& at, uint16_t mask,
                                                    uint64_t policy) {
  if (kMayClip && at.clipped) {
    ptx::tma_load_5d_multicast(dst, map, bar, column, at.row0 + row, at.c2, at.c3, kWrapSteps, mask,
                               policy);
  } else {
    ptx::tma_load_4d_multicast(dst, map, bar, column, at.row0 + row, at.c2, at.c3, mask, policy);
  }
}

// Rows past the end are not written.
template <bool kMayClip = true>
__device__ __forceinline__ void store_rows(const CUtensorMap* map, uint32_t src, int column,
                                           int row, const MapRows& at) {
  if (kMayClip && at.clipped) {
    ptx::tma_store_5d(map, src, column, at.row0 + row, at.c2, at.c3, kWrapSteps);
  } else {
    ptx::tma_store_4d(map, src, column, at.row0 + row, at.c2, at.c3);
  }
}

}  // namespace flash_cuda
