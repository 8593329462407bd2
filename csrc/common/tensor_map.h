// Tensor maps: how the copy engine finds a box of a tensor.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/params.h"

namespace flash_cuda {

// Dimensions from the contiguous one outwards; strides of dims 1..3 in elements.
struct TensorMapShape {
  const void* base;
  int64_t dims[4];
  int64_t strides[3];
  int box[4];
  int swizzle_bytes;  // 128, 64 or 32: the bytes of a row in shared memory
  // A fifth dimension, where it is not 0: its bytes a step. Its coordinate is kWrapSteps.
  uint64_t wrap_bytes = 0;
};

// Addresses are computed modulo 2^64, so kWrapSteps steps of kWrapTurn - x bytes take x *
// kWrapSteps bytes off an address: rows can be counted from far outside of the tensor while the
// base of the map lies in it. It must: of a box without any element in bounds the copy engine still
// touches the base (an illegal access on an H200 where nothing is mapped there).
constexpr int kWrapSteps = 1 << 30;
constexpr uint64_t kWrapTurn = uint64_t(1) << 34;

// Elements of 16 bits or float32, out of bounds reads as zero. Throws std::runtime_error.
CUtensorMap make_tensor_map(const TensorMapShape& shape, DType dtype);

}  // namespace flash_cuda
