// Thread block clusters (PTX ISA, "barrier.cluster", "mapa", "%cluster_ctarank").
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

__device__ __forceinline__ uint32_t cluster_block_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in the cluster's shared window, of `addr` as block `rank` sees it.
__device__ __forceinline__ uint32_t mapa(uint32_t addr, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(addr), "r"(rank));
  return mapped;
}

// `addr` is an address in the cluster's shared window.
__device__ __forceinline__ void store_cluster_4(uint32_t addr, int v) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}

// The same, and its four bytes complete on `bar`, which lies in the same block as `addr`.
__device__ __forceinline__ void store_cluster_async_4(uint32_t addr, int v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(addr),
      "r"(v), "r"(bar)
      : "memory");
}

// Copies shared memory to another block of the cluster, where its bytes complete on `bar`: `dst`
// and `bar` are addresses in the cluster's window.
__device__ __forceinline__ void bulk_copy_to_peer(uint32_t dst, uint32_t src, int bytes,
                                                  uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(dst),
      "r"(src), "r"(bytes), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

}  // namespace flash_cuda::ptx
