#include "api/args.h"

#include "api/check.h"

namespace flash_cuda {

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::kFloat16:
      return "float16";
    case ScalarType::kBFloat16:
      return "bfloat16";
    case ScalarType::kFloat8E4M3:
      return "float8_e4m3fn";
    case ScalarType::kFloat32:
      return "float32";
    case ScalarType::kFloat64:
      return "float64";
    case ScalarType::kInt32:
      return "int32";
    case ScalarType::kInt64:
      return "int64";
    case ScalarType::kFloat8E5M2:
      return "float8_e5m2";
    case ScalarType::kInt8:
      return "int8";
    case ScalarType::kUInt8:
      return "uint8";
    case ScalarType::kInt16:
      return "int16";
    case ScalarType::kBool:
      return "bool";
    case ScalarType::kUInt16:
      return "uint16";
    case ScalarType::kUInt32:
      return "uint32";
    case ScalarType::kUInt64:
      return "uint64";
    case ScalarType::kComplex32:
      return "complex32";
    case ScalarType::kComplex64:
      return "complex64";
    case ScalarType::kComplex128:
      return "complex128";
    case ScalarType::kFloat8E4M3Fnuz:
      return "float8_e4m3fnuz";
    case ScalarType::kFloat8E5M2Fnuz:
      return "float8_e5m2fnuz";
    case ScalarType::kOther:
      break;
  }
  return "another dtype";
}

int bytes_of(ScalarType type) {
  switch (type) {
    case ScalarType::kFloat64:
    case ScalarType::kInt64:
      return 8;
    case ScalarType::kFloat32:
    case ScalarType::kInt32:
      return 4;
    case ScalarType::kFloat16:
    case ScalarType::kBFloat16:
    case ScalarType::kInt16:
      return 2;
    default:
      return 1;
  }
}

std::string shape_text(const TensorInfo& tensor) {
  std::string text = "(";
  for (int i = 0; i < tensor.ndim; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tensor.sizes[i]);
  }
  return text + (tensor.ndim == 1 ? ",)" : ")");
}

std::string device_text(const TensorInfo& tensor) {
  switch (tensor.device) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kMeta:
      return "meta";
    case DeviceType::kCuda:
      return tensor.device_index < 0 ? "cuda" : "cuda:" + std::to_string(tensor.device_index);
    case DeviceType::kOther:
      break;
  }
  return "another device";
}

}  // namespace flash_cuda
