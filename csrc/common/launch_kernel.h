// Launching a kernel: opt-in shared memory, empty grids, errors as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "common/params.h"

namespace flash_cuda {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

template <class... KernelArgs, class... Args>
void launch_kernel(void (*kernel)(KernelArgs...), int64_t blocks, int threads, int smem_bytes,
                   cudaStream_t stream, const Args&... args) {
  if (blocks <= 0) return;
  if (blocks > 0x7fffffff) {
    throw std::runtime_error("the problem needs more than 2^31 - 1 thread blocks");
  }
  if (smem_bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
               "cudaFuncSetAttribute");
  }
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, stream>>>(args...);
  check_cuda(cudaGetLastError(), "kernel launch");
}

}  // namespace flash_cuda
