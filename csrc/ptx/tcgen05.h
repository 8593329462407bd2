// Tensor memory and the matrix unit behind it (PTX ISA, "TensorCore 5th Generation Family").
//
// Tensor memory is 128 lanes x 512 columns of 32 bits; an address is lane << 16 | column. Warp w of
// a block reaches the lanes 32 (w % 4) to 32 (w % 4) + 31. Loads, stores, products and copies are
// asynchronous: registers of a load count after tcgen05_wait_ld, stores are seen by others after
// tcgen05_wait_st, products after the mbarrier of a tcgen05_commit.
//
// kCtas (cta_group), the same in all instructions of a kernel: 1, or 2 for pairs of thread blocks,
// the blocks 2i and 2i + 1 of a cluster. One thread of the even one, the leader, then issues
// products for both: each block has half of the rows of A and of the result, and half of the
// columns of B, at the same addresses. Rows of D = A B, 256 of them: the first 128 in the leader's
// tensor memory. 128 rows: 64 each, whose upper half of columns lies in lanes 64 to 127.
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

// ---- allocation; a whole warp, of each block

// The address goes to shared memory. `columns`: 32, 64, ... 512.
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_alloc(uint32_t smem_result, uint32_t columns) {
  asm volatile(
      "tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_result),
      "r"(columns), "n"(kCtas)
      : "memory");
}
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kCtas)
               : "memory");
}
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t tmem, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(columns),
               "n"(kCtas)
               : "memory");
}

// ---- order between threads: before a barrier that tells of tensor memory, and after it

__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_wait_ld() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_wait_st() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// ---- registers; a whole warp, thread t of it has lane t of the warp's 32

// 16 columns.
__device__ __forceinline__ void tcgen05_ld_x16(uint32_t* r, uint32_t tmem) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, [%16];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
        "=r"(r[7]), "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]),
        "=r"(r[14]), "=r"(r[15])
      : "r"(tmem)
      : "memory");
}
__device__ __forceinline__ void tcgen05_st_x16(uint32_t tmem, const uint32_t* r) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15, %16};" ::"r"(tmem),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]),
      "r"(r[8]), "r"(r[9]), "r"(r[10]), "r"(r[11]), "r"(r[12]), "r"(r[13]), "r"(r[14]), "r"(r[15])
      : "memory");
}
// 32 columns.
__device__ __forceinline__ void tcgen05_ld_x32(uint32_t* r, uint32_t tmem) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
      "%30, %31}, [%32];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
        "=r"(r[7]), "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]),
        "=r"(r[14]), "=r"(r[15]), "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]),
        "=r"(r[21]), "=r"(r[22]), "=r"(r[23]), "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]),
        "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
      : "r"(tmem)
      : "memory");
}

// 16 lanes (the warp's lower or upper ones) and 32 columns in the layout of mma.sync accumulators:
// four registers for each 16 x 8 tile.
__device__ __forceinline__ void tcgen05_ld_16x256b_x4(uint32_t* r, uint32_t tmem) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, [%16];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
        "=r"(r[7]), "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]),
        "=r"(r[14]), "=r"(r[15])
      : "r"(tmem)
      : "memory");
}

// Registers of a load that has been waited for: no use of them moves before this point.
template <int kRegisters>
__device__ __forceinline__ void tcgen05_loaded(uint32_t (&r)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// ---- products; one thread issues

// 128-byte rows of a swizzled tile, as the tensor map writes them.
constexpr uint64_t kTcgen05Swizzle128 = 2;

// The constant part of a shared-memory descriptor; offsets in bytes. K-major: `stride` lies between
// groups of 8 rows, `leading` is not used. MN-major: `stride` between groups of 8 along K,
// `leading` between panels of 64 elements.
constexpr uint64_t tcgen05_desc_base(uint32_t leading, uint32_t stride, uint64_t swizzle) {
  constexpr uint64_t kVersion = uint64_t(1) << 46;
  return uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | kVersion | swizzle << 61;
}
__device__ __forceinline__ uint64_t tcgen05_desc(uint32_t smem, uint64_t base) {
  return base | ((smem & 0x3FFFF) >> 4);
}
// `x`, of which the compiler knows nothing: what is computed from it stays where it is used.
__device__ __forceinline__ uint32_t made_anew(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The instruction descriptor of kind::f16 with float32 accumulators.
constexpr uint32_t tcgen05_f16_instruction(bool bf16, bool a_mn_major, bool b_mn_major, int m,
                                           int n) {
  const uint32_t type = bf16 ? 1 : 0;
  return 1u << 4 | type << 7 | type << 10 | uint32_t(a_mn_major) << 15 |
         uint32_t(b_mn_major) << 16 | uint32_t(n / 8) << 17 | uint32_t(m / 16) << 24;
}

// D (tensor memory) = A B, or += if `accumulate`; 16 deep. A and B in shared memory.
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_mma_ss(uint32_t d, uint64_t a, uint64_t b,
                                               uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::%5.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(int(accumulate)), "n"(kCtas)
      : "memory");
}
// The same with A in tensor memory, two 16-bit elements a column.
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_mma_ts(uint32_t d, uint32_t a, uint64_t b,
                                               uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::%5.kind::f16 [%0], [%1], %2, %3, p;\n}" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(int(accumulate)), "n"(kCtas)
      : "memory");
}
// Arrives on the mbarrier, that of both blocks, when everything that this thread has issued is
// done.
template <int kCtas = 1>
__device__ __forceinline__ void tcgen05_commit(uint32_t bar) {
  if constexpr (kCtas == 1) {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(bar)
        : "memory");
  } else {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%0], %1;" ::"r"(bar),
        "h"(uint16_t(3))
        : "memory");
  }
}

}  // namespace flash_cuda::ptx
