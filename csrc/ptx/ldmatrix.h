// 8x8 matrices of 16-bit elements from shared memory to mma fragments (PTX ISA: ldmatrix).
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

// Lane i gives the address of a 16-byte row: lanes 0-7 of matrix 0, 8-15 of matrix 1, and so on.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

// Each matrix is transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

}  // namespace flash_cuda::ptx
