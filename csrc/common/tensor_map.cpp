#include "common/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flash_cuda {
namespace {

// Through the runtime, so that nothing links against the driver library.
PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || !function) {
    throw std::runtime_error(
        "the CUDA driver has no cuTensorMapEncodeTiled: Hopper kernels need driver 525 or newer");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

CUtensorMapSwizzle swizzle_of(int bytes) {
  switch (bytes) {
    case 128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_32B;
  }
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMapShape& shape, DType dtype) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_function();
  cuuint64_t dims[5], strides[4];
  cuuint32_t box[5];
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) {
    dims[i] = static_cast<cuuint64_t>(shape.dims[i]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
  }
  for (int i = 0; i < 3; ++i) {
    // A dimension of one element may have any stride in the tensor, but not in the map.
    const int64_t stride = shape.dims[i + 1] == 1 ? 8 : shape.strides[i];
    strides[i] = static_cast<cuuint64_t>(stride) * (dtype == DType::kFloat32 ? 4 : 2);
  }
  const cuuint32_t rank = shape.wrap_bytes ? 5 : 4;
  dims[4] = cuuint64_t(kWrapSteps) + 1;
  strides[3] = shape.wrap_bytes;
  box[4] = 1;
  const CUtensorMapDataType type = dtype == DType::kFloat32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map;
  auto try_encode = [&] {
    return encode(&map, type, rank, const_cast<void*>(shape.base), dims, strides, box,
                  element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(shape.swizzle_bytes),
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = try_encode();
  // A thread that has not called the runtime yet (autograd's, say) has no context: bind it.
  if (result == CUDA_ERROR_INVALID_CONTEXT && cudaFree(nullptr) == cudaSuccess) {
    result = try_encode();
  }
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled failed with CUresult " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace flash_cuda
