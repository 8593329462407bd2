// Additions to global memory without a result, and counters (PTX ISA: red, ld.acquire, st.release).
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

// Adds an mma accumulator (4 values a lane) to a 128-float tile that only `accumulator_slot`
// explains. From sm_90 on a lane adds 16 bytes at once; before, four coalesced scalars.
__device__ __forceinline__ int accumulator_slot(int lane, int i) {
#if __CUDA_ARCH__ >= 900
  return lane * 4 + i;
#else
  return i * 32 + lane;
#endif
}
__device__ __forceinline__ void red_add_accumulator(float* tile, int lane, const float (&v)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(tile + lane * 4),
               "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(tile + i * 32 + lane), "f"(v[i])
                 : "memory");
  }
#endif
}

// The first values of such a tile, which needs no zeros then.
__device__ __forceinline__ void store_accumulator(float* tile, int lane, const float (&v)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(tile + lane * 4), "f"(v[0]),
               "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) tile[i * 32 + lane] = v[i];
#endif
}

__device__ __forceinline__ int load_relaxed(const int* ptr) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(ptr) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(int* ptr, int v) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(ptr), "r"(v) : "memory");
}
// Makes a relaxed load before it an acquire, and a relaxed store after it a release.
__device__ __forceinline__ void fence_acq_rel() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ int load_acquire(const int* ptr) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(ptr) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(int* ptr, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(ptr), "r"(v) : "memory");
}

// The value before. Orders what this thread has seen and written before it against what any thread
// does after a later addition.
__device__ __forceinline__ int add_acq_rel(int* ptr, int v) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(ptr), "r"(v)
               : "memory");
  return before;
}

__device__ __forceinline__ void add_release(int* ptr, int v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(ptr), "r"(v) : "memory");
}

}  // namespace flash_cuda::ptx
