// Values that the compiler must not look through.
#pragma once

namespace flash_cuda::ptx {

// What follows computes from this address, not from what it was computed from: an address that goes
// on by additions stays one register pair.
template <class T>
__device__ __forceinline__ void make_opaque(T*& address) {
  asm volatile("" : "+l"(address));
}

}  // namespace flash_cuda::ptx
