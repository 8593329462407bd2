// Launching a kernel: shared-memory opt-in, clusters, and errors as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash_cuda {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

// Lets `kernel` use `bytes` of dynamic shared memory on the current device; once per device.
// `done` belongs to that kernel.
template <class Kernel>
void allow_dynamic_smem(Kernel* kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  if (bit && (done.load(std::memory_order_relaxed) & bit)) return;
  check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory opt-in");
  done.fetch_or(bit, std::memory_order_relaxed);
}

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

struct LaunchShape {
  dim3 grid;
  int threads;
  int smem_bytes;
  int cluster = 1;
  // May start before the previous kernel of the stream ends; it calls griddep_wait() itself: before
  // it uses memory that others use, too, and before it lets the next kernel start. The first kernel
  // of a call, whose predecessor may be anybody's, does so unless it is being captured: in a graph
  // that costs more than it gains.
  bool after_dependency = false;
};

template <class... Params, class... Args>
void launch_kernel(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                   const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.smem_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (shape.after_dependency) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  config.attrs = attributes;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), "kernel launch");
}

}  // namespace flash_cuda
