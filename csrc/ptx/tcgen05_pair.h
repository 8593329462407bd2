// Tensor memory and products of two thread blocks (PTX ISA, "cta_group::2").
//
// A cluster's blocks 2i and 2i + 1 are a pair. One thread of the even one, the
// leader, issues products for both: each block has half of the rows of A and of
// the result, and half of the columns of B, at the same addresses. Rows of D =
// A B, 256 of them: the first 128 in the leader's tensor memory. 128 rows: 64
// each, whose upper half of columns lies in lanes 64 to 127. All tcgen05
// instructions of a kernel have the same cta_group; loads, stores and fences
// have none.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_cuda::ptx {

// ---- allocation; a warp of each block

__device__ __forceinline__ void tcgen05_alloc_pair(uint32_t smem_result, uint32_t columns) {
  asm volatile(
      "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_result),
      "r"(columns)
      : "memory");
}
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit_pair() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_dealloc_pair(uint32_t tmem, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(columns)
               : "memory");
}

// ---- products; the leader's thread

// `x`, of which the compiler knows nothing: what is computed from it stays where it is used.
__device__ __forceinline__ uint32_t made_anew(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ void tcgen05_mma_ss_pair(uint32_t d, uint64_t a, uint64_t b,
                                                    uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(int(accumulate))
      : "memory");
}
__device__ __forceinline__ void tcgen05_mma_ts_pair(uint32_t d, uint32_t a, uint64_t b,
                                                    uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::2.kind::f16 [%0], [%1], %2, %3, p;\n}" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(int(accumulate))
      : "memory");
}
// Arrives on the mbarrier of both blocks when everything that this thread has
// issued is done.
__device__ __forceinline__ void tcgen05_commit_pair(uint32_t bar) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::"
      "cluster.multicast::cluster.b64 "
      "[%0], %1;" ::"r"(bar),
      "h"(uint16_t(3))
      : "memory");
}

// ---- copies into this block, whose bytes complete on `bar` of either block of
// the pair

__device__ __forceinline__ void tma_load_4d_pair(uint32_t dst, const CUtensorMap* map, uint32_t bar,
                                                 int c0, int c1, int c2, int c3, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.cta_group::2.shared::cluster.global.mbarrier::"
      "complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_load_5d_pair(uint32_t dst, const CUtensorMap* map, uint32_t bar,
                                                 int c0, int c1, int c2, int c3, int c4,
                                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.cta_group::2.shared::cluster.global.mbarrier::"
      "complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

}  // namespace flash_cuda::ptx
