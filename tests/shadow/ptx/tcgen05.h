// Stand-in for compute capability 9.0: tensor memory is global memory, found by the number of the
// SM, and products are plain code of the warp that issues them (elect.h), done at issue. The warp
// that issues for two blocks reads the other one's shared memory and writes its tensor memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx/cluster.h"
#include "ptx/elect.h"
#include "ptx/mbarrier.h"

namespace flash_cuda::ptx {

__device__ uint32_t shadow_tmem[kShadowSms][128][512];

__device__ __forceinline__ volatile uint32_t* shadow_cell(uint32_t address) {
  return &shadow_tmem[shadow_sm()][address >> 16][address & 0xffff];
}

constexpr int kShadowBlocks = 1 << 16;
__device__ uint32_t shadow_sm_of_block[kShadowBlocks];

// What nobody has written is NaN.
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_alloc(uint32_t smem_result, uint32_t columns) {
  for (uint32_t lane = 0; lane < 128; ++lane) {
    for (uint32_t c = threadIdx.x % 32; c < columns; c += 32) {
      *shadow_cell(lane << 16 | c) = 0x7fffdead;
    }
  }
  if (threadIdx.x % 32 == 0) {
    shadow_issuer[shadow_sm()] = threadIdx.x / 32;
    if (kCtas == 2 && blockIdx.x >= kShadowBlocks) __trap();
    if (kCtas == 2) shadow_sm_of_block[blockIdx.x] = shadow_sm();
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem_result), "r"(0) : "memory");
  }
  __threadfence();
  __syncwarp();
}
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {}
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t, uint32_t) {}
// For the other block of a pair, too.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() { __threadfence(); }
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() { __threadfence(); }
__device__ __forceinline__ void tcgen05_wait_ld() {}
__device__ __forceinline__ void tcgen05_wait_st() { __threadfence(); }

template <int kColumns>
__device__ __forceinline__ void shadow_ld(uint32_t* r, uint32_t tmem) {
  const volatile uint32_t* from = shadow_cell(tmem + ((threadIdx.x % 32) << 16));
#pragma unroll
  for (int i = 0; i < kColumns; ++i) r[i] = from[i];
}
__device__ __forceinline__ void tcgen05_ld_x16(uint32_t* r, uint32_t tmem) {
  shadow_ld<16>(r, tmem);
}
__device__ __forceinline__ void tcgen05_ld_x32(uint32_t* r, uint32_t tmem) {
  shadow_ld<32>(r, tmem);
}
__device__ __forceinline__ void tcgen05_st_x16(uint32_t tmem, const uint32_t* r) {
  volatile uint32_t* to = shadow_cell(tmem + ((threadIdx.x % 32) << 16));
#pragma unroll
  for (int i = 0; i < 16; ++i) to[i] = r[i];
}
__device__ __forceinline__ void tcgen05_ld_16x256b_x4(uint32_t* r, uint32_t tmem) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t row = lane / 4 + i / 2 % 2 * 8, column = i % 2 + lane % 4 * 2 + i / 4 * 8;
    r[i] = *shadow_cell(tmem + (row << 16) + column);
  }
}
template <int kRegisters>
__device__ __forceinline__ void tcgen05_loaded(uint32_t (&)[kRegisters]) {}

// ---- descriptors, as in csrc/ptx/tcgen05.h

constexpr uint64_t kTcgen05Swizzle128 = 2;

constexpr uint64_t tcgen05_desc_base(uint32_t leading, uint32_t stride, uint64_t swizzle) {
  return uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | swizzle << 61;
}
__device__ __forceinline__ uint64_t tcgen05_desc(uint32_t smem, uint64_t base) {
  return base | ((smem & 0x3FFFF) >> 4);
}
__device__ __forceinline__ uint32_t made_anew(uint32_t x) { return x; }
constexpr uint32_t tcgen05_f16_instruction(bool bf16, bool a_mn_major, bool b_mn_major, int m,
                                           int n) {
  return uint32_t(bf16) << 7 | uint32_t(a_mn_major) << 15 | uint32_t(b_mn_major) << 16 |
         uint32_t(n / 8) << 17 | uint32_t(m / 16) << 24;
}

// ---- products

__device__ __forceinline__ float shadow_float(uint32_t bits, bool bf16) {
  const uint16_t half = bits & 0xffff;
  return bf16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(half));
}
// Sixteen elements of a row that lies in tensor memory, two in each of its words.
__device__ __forceinline__ void shadow_unpack(float (&x)[16], const volatile uint32_t* from,
                                              bool bf16) {
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t pair = from[i];
    x[2 * i] = shadow_float(pair & 0xffff, bf16);
    x[2 * i + 1] = shadow_float(pair >> 16, bf16);
  }
}
// Element (row, k) of an operand in the 128-byte swizzle; k < 16.
__device__ __forceinline__ float shadow_element(uint64_t desc, bool mn_major, uint32_t row,
                                                uint32_t k, bool bf16) {
  const uint32_t start = (desc & 0x3fff) << 4, leading = (desc >> 16 & 0x3fff) << 4,
                 stride = (desc >> 32 & 0x3fff) << 4;
  uint32_t at = mn_major ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                         : start + row / 8 * stride + row % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  uint16_t bits;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(at) : "memory");
  return shadow_float(bits, bf16);
}
// A is in tensor memory if `ts`; a lane has every 32nd row. Once in a kernel, however often it is
// called.
static __device__ __noinline__ void shadow_mma(uint32_t d, bool ts, uint32_t a_tmem, uint64_t a,
                                               uint64_t b, uint32_t instruction, bool accumulate) {
  const bool bf16 = instruction >> 7 & 1, a_mn = instruction >> 15 & 1,
             b_mn = instruction >> 16 & 1;
  const uint32_t n = (instruction >> 17 & 63) * 8;
  __syncwarp();
  for (uint32_t first = 0; first < n; first += 16) {
    float columns[16][16];
#pragma unroll 1
    for (uint32_t c = 0; c < 16; ++c) {
#pragma unroll
      for (uint32_t k = 0; k < 16; ++k) {
        columns[c][k] = shadow_element(b, b_mn, first + c, k, bf16);
      }
    }
#pragma unroll 1
    for (uint32_t row = threadIdx.x % 32; row < 128; row += 32) {
      float left[16];
      if (ts) {
        shadow_unpack(left, shadow_cell(a_tmem + (row << 16)), bf16);
      } else {
#pragma unroll
        for (uint32_t k = 0; k < 16; ++k) left[k] = shadow_element(a, a_mn, row, k, bf16);
      }
      volatile uint32_t* to = shadow_cell(d + (row << 16) + first);
#pragma unroll 4
      for (uint32_t c = 0; c < 16; ++c) {
        float sum = accumulate ? __uint_as_float(to[c]) : 0.0f;
#pragma unroll
        for (uint32_t k = 0; k < 16; ++k) sum = fmaf(left[k], columns[c][k], sum);
        to[c] = __float_as_uint(sum);
      }
    }
  }
}
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
        shadow_unpack(left, &tmem[row][a_tmem & 0xffff], bf16);
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
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_mma_ss(uint32_t d, uint64_t a, uint64_t b,
                                               uint32_t instruction, bool accumulate) {
  (kCtas == 1 ? shadow_mma : shadow_mma_pair)(d, false, 0, a, b, instruction, accumulate);
}
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_mma_ts(uint32_t d, uint32_t a, uint64_t b,
                                               uint32_t instruction, bool accumulate) {
  (kCtas == 1 ? shadow_mma : shadow_mma_pair)(d, true, a, 0, b, instruction, accumulate);
}
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_commit(uint32_t bar) {
  __threadfence();
  __syncwarp();
  if (kCtas == 1) return mbarrier_arrive(bar);
  if (threadIdx.x % 32 != 0) return;
  mbarrier_arrive_cluster(mapa(bar, 0));
  mbarrier_arrive_cluster(mapa(bar, 1));
}

}  // namespace flash_cuda::ptx
