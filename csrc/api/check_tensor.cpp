#include "api/check_tensor.h"

#include "api/check.h"
#include "api/refusal.h"

namespace flash_cuda {

bool is_attention_dtype(ScalarType type) {
  return type == ScalarType::kFloat16 || type == ScalarType::kBFloat16 ||
         type == ScalarType::kFloat32 || type == ScalarType::kFloat64 ||
         type == ScalarType::kFloat8E4M3;
}

void check_device(const TensorInfo& t, const TensorInfo& q) {
  const bool same =
      t.device == q.device && (t.device != DeviceType::kCuda || t.device_index == q.device_index);
  if (t.given() && !same) {
    refuse_value(t.name, " must be on the device of ", q.name, " (", device_text(q), "), got ",
                 device_text(t));
  }
}

void check_dtype(const TensorInfo& t, ScalarType wanted) {
  if (t.dtype != wanted) {
    refuse_type(t.name, " must be ", name_of(wanted), ", got ", name_of(t.dtype));
  }
}

void check_rows_contiguous(const TensorInfo& t) {
  if (!t.rows_contiguous()) {
    refuse_value(t.name, " must have a last dimension with stride 1, got stride ", t.stride(-1),
                 "; ", t.name, ".contiguous() has it");
  }
}

void check_shape(const TensorInfo& t, std::initializer_list<int64_t> shape, const char* meaning) {
  bool same = t.ndim == static_cast<int>(shape.size());
  for (int i = 0; same && i < t.ndim; ++i) same = t.sizes[i] == shape.begin()[i];
  if (same) return;
  const TensorInfo wanted{"", nullptr, shape.begin(), nullptr, static_cast<int>(shape.size())};
  refuse_value(t.name, " must have shape ", meaning, " = ", shape_text(wanted), ", got ",
               shape_text(t));
}

void check_lengths_vector(const TensorInfo& t, int64_t batch) {
  if (!t.given()) return;
  check_dtype(t, ScalarType::kInt32);
  check_shape(t, {batch}, "(batch)");
  check_rows_contiguous(t);
}

void check_qkv_dtype(const TensorInfo& q, const TensorInfo& k, const TensorInfo& v) {
  if (!is_attention_dtype(q.dtype)) {
    refuse_type(q.name, " must be float16, bfloat16, float32, float64 or float8_e4m3fn, got ",
                name_of(q.dtype));
  }
  if (k.dtype != q.dtype || v.dtype != q.dtype) {
    refuse_type(q.name, ", ", k.name, " and ", v.name, " must have the same dtype, got ",
                name_of(q.dtype), ", ", name_of(k.dtype), " and ", name_of(v.dtype));
  }
}

}  // namespace flash_cuda
