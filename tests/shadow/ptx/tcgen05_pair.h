// Stand-in for compute capability 9.0: products of two blocks are plain code of the leader's
// warp, which reads the other block's shared memory and writes its tensor memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/cluster.h"
#include "ptx/mbarrier.h"
#include "ptx/tcgen05.h"
#include "ptx/tma.h"

namespace flash_cuda::ptx {

constexpr int kShadowBlocks = 1 << 16;
__device__ uint32_t shadow_sm_of_block[kShadowBlocks];

__device__ __forceinline__ void tcgen05_alloc_pair(uint32_t smem_result, uint32_t columns) {
  if (blockIdx.x >= kShadowBlocks) __trap();
  shadow_sm_of_block[blockIdx.x] = shadow_sm();
  tcgen05_alloc(smem_result, columns);
  __threadfence();
}
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit_pair() {}
__device__ __forceinline__ void tcgen05_dealloc_pair(uint32_t, uint32_t) {}
__device__ __forceinline__ uint32_t made_anew(uint32_t x) { return x; }

// Element (row, k) of an operand in the shared memory of a block of the pair; see shadow_element.
__device__ __forceinline__ float shadow_element_of(uint32_t block, uint64_t desc, bool mn_major,
                                                   uint32_t row, uint32_t k, bool bf16) {
  const uint32_t start = (desc & 0x3fff) << 4, leading = (desc >> 16 & 0x3fff) << 4,
                 stride = (desc >> 32 & 0x3fff) << 4;
  uint32_t at = mn_major ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                         : start + row / 8 * stride + row % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  uint16_t bits;
  asm volatile("ld.shared::cluster.b16 %0, [%1];" : "=h"(bits) : "r"(mapa(at, block)) : "memory");
  return shadow_float(bits, bf16);
}
static __device__ __noinline__ void shadow_mma_pair(uint32_t d, bool ts, uint32_t a_tmem,
                                                    uint64_t a, uint64_t b, uint32_t instruction,
                                                    bool accumulate) {
  const bool bf16 = instruction >> 7 & 1, a_mn = instruction >> 15 & 1,
             b_mn = instruction >> 16 & 1;
  const uint32_t n = (instruction >> 17 & 63) * 8, rows = (instruction >> 24 & 31) * 8;
  if (ts && rows != 128) __trap();  // A would have to lie in tensor memory twice
  __threadfence();
  __syncwarp();
  for (uint32_t first = 0; first < n; first += 16) {
    float columns[16][16];
    const uint32_t upper = first >= n / 2, in_half = first - upper * (n / 2);
#pragma unroll 1
    for (uint32_t c = 0; c < 16; ++c) {
#pragma unroll
      for (uint32_t k = 0; k < 16; ++k) {
        columns[c][k] = shadow_element_of(upper, b, b_mn, in_half + c, k, bf16);
      }
    }
    const uint32_t lane0 = rows == 64 ? 64 * upper : 0, column = rows == 64 ? in_half : first;
#pragma unroll 1
    for (uint32_t at = threadIdx.x % 32; at < 2 * rows; at += 32) {
      const uint32_t block = at / rows, row = at % rows;
      volatile uint32_t (*tmem)[512] = shadow_tmem[shadow_sm_of_block[blockIdx.x + block]];
      float left[16];
      if (ts) {
        const volatile uint32_t* from = &tmem[row][a_tmem & 0xffff];
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
          const uint32_t pair = from[i];
          left[2 * i] = shadow_float(pair & 0xffff, bf16);
          left[2 * i + 1] = shadow_float(pair >> 16, bf16);
        }
      } else {
#pragma unroll
        for (uint32_t k = 0; k < 16; ++k) {
          left[k] = shadow_element_of(block, a, a_mn, row, k, bf16);
        }
      }
      volatile uint32_t* to = &tmem[lane0 + row][(d & 0xffff) + column];
      float sums[16];
#pragma unroll
      for (uint32_t c = 0; c < 16; ++c) sums[c] = accumulate ? __uint_as_float(to[c]) : 0.0f;
#pragma unroll 4
      for (uint32_t c = 0; c < 16; ++c) {
#pragma unroll
        for (uint32_t k = 0; k < 16; ++k) sums[c] = fmaf(left[k], columns[c][k], sums[c]);
      }
#pragma unroll
      for (uint32_t c = 0; c < 16; ++c) to[c] = __float_as_uint(sums[c]);
    }
  }
}
__device__ __forceinline__ void tcgen05_mma_ss_pair(uint32_t d, uint64_t a, uint64_t b,
                                                    uint32_t instruction, bool accumulate) {
  shadow_mma_pair(d, false, 0, a, b, instruction, accumulate);
}
__device__ __forceinline__ void tcgen05_mma_ts_pair(uint32_t d, uint32_t a, uint64_t b,
                                                    uint32_t instruction, bool accumulate) {
  shadow_mma_pair(d, true, a, 0, b, instruction, accumulate);
}
__device__ __forceinline__ void tcgen05_commit_pair(uint32_t bar) {
  __threadfence();
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  mbarrier_arrive_cluster(mapa(bar, 0));
  mbarrier_arrive_cluster(mapa(bar, 1));
}

// Hopper's copies complete on barriers of their own block. The other block's copy completes on the
// barrier at the same place there, which nobody else uses; then it tells the leader of the bytes.
// All boxes have 64 rows of 128 bytes.
template <class Copy>
__device__ __forceinline__ void shadow_load_pair(uint32_t dst, uint32_t bar, Copy copy) {
  constexpr uint32_t kBytes = 64 * 128;
  const uint32_t own = (bar & 0xffffff) | (dst & 0xff000000);
  if (cluster_block_rank() == 0) return copy(own);
  uint64_t state;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;"
               : "=l"(state)
               : "r"(own), "r"(kBytes)
               : "memory");
  copy(own);
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(own),
      "l"(state)
      : "memory");
  __threadfence();
  asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;" ::"r"(bar),
               "r"(kBytes)
               : "memory");
}
__device__ __forceinline__ void tma_load_4d_pair(uint32_t dst, const CUtensorMap* map, uint32_t bar,
                                                 int c0, int c1, int c2, int c3, uint64_t policy) {
  shadow_load_pair(dst, bar,
                   [&](uint32_t own) { tma_load_4d(dst, map, own, c0, c1, c2, c3, policy); });
}
__device__ __forceinline__ void tma_load_5d_pair(uint32_t dst, const CUtensorMap* map, uint32_t bar,
                                                 int c0, int c1, int c2, int c3, int c4,
                                                 uint64_t policy) {
  shadow_load_pair(dst, bar,
                   [&](uint32_t own) { tma_load_5d(dst, map, own, c0, c1, c2, c3, c4, policy); });
}

}  // namespace flash_cuda::ptx
