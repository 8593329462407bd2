// How a test kernel is called from Python: a C function that returns null or what went wrong.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

#define TEST_EXPORT extern "C" __attribute__((visibility("default")))

template <class Fn>
const char* guarded(Fn fn) {
  static std::string message;
  try {
    fn();
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return nullptr;
    message = std::string("CUDA: ") + cudaGetErrorString(error);
  } catch (const std::exception& e) {
    message = e.what();
  }
  return message.c_str();
}

__device__ inline uint32_t shared32(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
