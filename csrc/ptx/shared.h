// Words in shared memory by their 32-bit address.
//
// A __shared__ variable's own address is made anew at every use (it depends on the block's rank in
// its cluster), which a main loop feels; an offset from an address in a register costs nothing.
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

template <class T>
__device__ __forceinline__ T* shared_pointer(uint32_t at) {
  return static_cast<T*>(__cvta_shared_to_generic(at));
}

// Other threads may write it at any time.
__device__ __forceinline__ uint32_t load_shared(uint32_t at) {
  uint32_t x;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t at, uint32_t x) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

}  // namespace flash_cuda::ptx
