// Stores to global memory whose width is certain: of values that come out of inline assembly the
// compiler may store the words of a uint4 one by one.
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

__device__ __forceinline__ void store_global_16(void* to, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

}  // namespace flash_cuda::ptx
