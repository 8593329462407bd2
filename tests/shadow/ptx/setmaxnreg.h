// Stand-in for compute capability 9.0: the products of ptx/tcgen05.h need more registers than the
// warp that issues them would have.
#pragma once

namespace flash_cuda::ptx {

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {}

}  // namespace flash_cuda::ptx
