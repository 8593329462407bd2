// Where the accumulators of a warp's matrix multiply live in registers.
//
// The fragment interface (kRows, kCols, at, row, col) lets masks, softmax and score modifications
// be written once. MmaFragment is the layout of mma.sync m16n8 tiles, and of a wgmma warp.
#pragma once

#include "common/host_device.h"

namespace flash_cuda {

// 16 x kWidth accumulators of a warp; a lane holds kCols values of each of kRows rows.
template <int kWidth>
struct MmaFragment {
  static_assert(kWidth % 8 == 0);
  static constexpr int kRows = 2, kCols = kWidth / 4, kTiles = kWidth / 8;

  float acc[kTiles][4];

  FLASH_CUDA_HOST_DEVICE float& at(int r, int c) { return acc[c / 2][2 * r + c % 2]; }
  FLASH_CUDA_HOST_DEVICE float at(int r, int c) const { return acc[c / 2][2 * r + c % 2]; }

  FLASH_CUDA_HOST_DEVICE static constexpr int row(int lane, int r) { return lane / 4 + 8 * r; }
  FLASH_CUDA_HOST_DEVICE static constexpr int col(int lane, int c) {
    return c / 2 * 8 + 2 * (lane % 4) + c % 2;
  }

  FLASH_CUDA_HOST_DEVICE void clear() {
    for (int t = 0; t < kTiles; ++t) {
      for (int i = 0; i < 4; ++i) acc[t][i] = 0.0f;
    }
  }
};

#if defined(__CUDACC__)
// The four lanes of a quad hold one row of an MmaFragment.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
#endif

}  // namespace flash_cuda
