// Tensor maps: how the copy engine finds a box of a 4-D tensor.
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
};

// 16-bit elements, out of bounds reads as zero. Throws std::runtime_error.
CUtensorMap make_tensor_map(const TensorMapShape& shape, DType dtype);

}  // namespace flash_cuda
