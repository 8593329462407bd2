// Gradients on their way out of a thread block.
#pragma once

#include "common/params.h"
#include "ptx/convert.h"
#include "ptx/smem_addr.h"
#include "ptx/tcgen05.h"

namespace flash_cuda::sm100 {

// 32 columns of tensor memory, scaled and rounded, into a thread's row of a swizzled tile, of which
// the 16-byte chunk i is at `row` ^ i << 4.
template <DType kDType>
__device__ __forceinline__ void stage_columns(uint32_t row, int first_chunk, uint32_t tmem,
                                              float scale) {
  uint32_t r[32];
  ptx::tcgen05_ld_x32(r, tmem);
  ptx::tcgen05_wait_ld();
  ptx::tcgen05_loaded(r);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      packed[j] = ptx::pack<kDType>(__uint_as_float(r[8 * i + 2 * j]) * scale,
                                    __uint_as_float(r[8 * i + 2 * j + 1]) * scale);
    }
    ptx::store_shared_16(row ^ ((first_chunk + i) << 4), packed);
  }
}

// Rows of a 16-bit tensor, if there is one, become zero; by all threads of a block.
__device__ __forceinline__ void zero_rows(void* tensor, const Stride& stride, int batch, int head,
                                          int64_t first, int rows, int head_dim) {
  if (!tensor) return;
  auto* base = static_cast<uint16_t*>(tensor) + batch * stride.batch + head * stride.head +
               first * stride.row;
  const int chunks = head_dim / 8;
  for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
    *reinterpret_cast<uint4*>(base + i / chunks * stride.row + i % chunks * 8) = uint4{};
  }
}

}  // namespace flash_cuda::sm100
