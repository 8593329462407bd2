// Fences between the ways to reach memory (PTX ISA, "membar / fence").
#pragma once

namespace flash_cuda::ptx {

// Orders this thread's writes to shared memory before later reads by wgmma or the copy engine.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders this thread's writes to global memory before later reads by the copy engine.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Makes mbarrier_init visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace flash_cuda::ptx
