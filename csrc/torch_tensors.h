// Tensors of torch, through its stable ABI: reading the arguments of an op off torch's stack,
// allocating results and workspaces, the device and the stream of a call.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "api/args.h"
#include "api/device.h"
#include "api/dispatch.h"

namespace flash_cuda {

namespace stable = torch::stable;
using stable::Tensor;
using stable::accelerator::DeviceGuard;

// The C functions of torch report by a code; their own macro for it changed its name in 2.12.
inline void check_torch(AOTITorchError code) {
  if (code != AOTI_TORCH_SUCCESS) throw std::runtime_error("a call of torch's C API failed");
}

// ---- reading arguments

constexpr int kMaxTypes = 64;  // numbers of torch's dtypes are below

inline const std::array<ScalarType, kMaxTypes>& scalar_types() {
  static const auto types = [] {
    std::array<ScalarType, kMaxTypes> t;
    t.fill(ScalarType::kOther);
    t[aoti_torch_dtype_float16()] = ScalarType::kFloat16;
    t[aoti_torch_dtype_bfloat16()] = ScalarType::kBFloat16;
    t[aoti_torch_dtype_float8_e4m3fn()] = ScalarType::kFloat8E4M3;
    t[aoti_torch_dtype_float32()] = ScalarType::kFloat32;
    t[aoti_torch_dtype_float64()] = ScalarType::kFloat64;
    t[aoti_torch_dtype_int32()] = ScalarType::kInt32;
    t[aoti_torch_dtype_int64()] = ScalarType::kInt64;
    t[aoti_torch_dtype_float8_e5m2()] = ScalarType::kFloat8E5M2;
    t[aoti_torch_dtype_int8()] = ScalarType::kInt8;
    t[aoti_torch_dtype_uint8()] = ScalarType::kUInt8;
    t[aoti_torch_dtype_int16()] = ScalarType::kInt16;
    t[aoti_torch_dtype_bool()] = ScalarType::kBool;
    t[aoti_torch_dtype_uint16()] = ScalarType::kUInt16;
    t[aoti_torch_dtype_uint32()] = ScalarType::kUInt32;
    t[aoti_torch_dtype_uint64()] = ScalarType::kUInt64;
    t[aoti_torch_dtype_complex32()] = ScalarType::kComplex32;
    t[aoti_torch_dtype_complex64()] = ScalarType::kComplex64;
    t[aoti_torch_dtype_complex128()] = ScalarType::kComplex128;
    t[aoti_torch_dtype_float8_e4m3fnuz()] = ScalarType::kFloat8E4M3Fnuz;
    t[aoti_torch_dtype_float8_e5m2fnuz()] = ScalarType::kFloat8E5M2Fnuz;
    return t;
  }();
  return types;
}

inline ScalarType scalar_type_of(int32_t code) {
  return code >= 0 && code < kMaxTypes ? scalar_types()[code] : ScalarType::kOther;
}

inline int32_t code_of(ScalarType type) {
  switch (type) {
    case ScalarType::kFloat16:
      return aoti_torch_dtype_float16();
    case ScalarType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::kFloat8E4M3:
      return aoti_torch_dtype_float8_e4m3fn();
    case ScalarType::kFloat64:
      return aoti_torch_dtype_float64();
    case ScalarType::kInt32:
      return aoti_torch_dtype_int32();
    case ScalarType::kUInt8:
      return aoti_torch_dtype_uint8();
    default:
      return aoti_torch_dtype_float32();
  }
}

inline DeviceType device_type_of(int32_t code) {
  if (code == aoti_torch_device_type_cuda()) return DeviceType::kCuda;
  if (code == aoti_torch_device_type_cpu()) return DeviceType::kCpu;
  return code == aoti_torch_device_type_meta() ? DeviceType::kMeta : DeviceType::kOther;
}

inline TensorInfo describe(const char* name, const Tensor& tensor) {
  TensorInfo info;
  info.name = name;
  int64_t *sizes = nullptr, *strides = nullptr, ndim = 0;
  int32_t dtype = 0, device = 0, index = 0;
  void* data = nullptr;
  const AtenTensorHandle handle = tensor.get();
  check_torch(aoti_torch_get_dim(handle, &ndim));
  check_torch(aoti_torch_get_sizes(handle, &sizes));
  check_torch(aoti_torch_get_strides(handle, &strides));
  check_torch(aoti_torch_get_dtype(handle, &dtype));
  check_torch(aoti_torch_get_device_type(handle, &device));
  check_torch(aoti_torch_get_device_index(handle, &index));
  check_torch(aoti_torch_get_data_ptr(handle, &data));
  info.data = data;
  info.sizes = sizes;
  info.strides = strides;
  info.ndim = static_cast<int>(ndim);
  info.dtype = scalar_type_of(dtype);
  info.device = device_type_of(device);
  info.device_index = index;
  return info;
}

// Takes the arguments of a call off the stack, in order, and owns its tensors.
class ArgReader {
 public:
  explicit ArgReader(StableIValue* stack) : next_(stack) { tensors_.reserve(32); }

  TensorInfo tensor(const char* name) { return keep(name, stable::detail::to<Tensor>(*next_++)); }
  TensorInfo optional_tensor(const char* name) {
    auto tensor = optional<Tensor>(name);
    return tensor ? keep(name, std::move(*tensor)) : TensorInfo{name};
  }
  template <class T>
  T value(const char*, T) {  // torch has filled in the default
    return stable::detail::to<T>(*next_++);
  }
  template <class T>
  std::optional<T> optional(const char*) {
    return stable::detail::to<std::optional<T>>(*next_++);
  }
  std::optional<ScalarType> optional_dtype(const char* name) {
    const auto type = optional<torch::headeronly::ScalarType>(name);
    if (!type) return std::nullopt;
    return scalar_type_of(stable::detail::to<int32_t>(stable::detail::from(*type)));
  }

  TensorInfo keep(const char* name, Tensor tensor) {
    tensors_.push_back(std::move(tensor));
    return describe(name, tensors_.back());
  }
  const Tensor& tensor_of(const TensorInfo& info) const {
    for (const Tensor& tensor : tensors_) {
      int64_t* sizes = nullptr;
      check_torch(aoti_torch_get_sizes(tensor.get(), &sizes));
      if (sizes == info.sizes) return tensor;
    }
    throw std::logic_error("not an argument of this call");
  }
  // Kernels read rows; a gradient may come broadcast or transposed.
  void make_rows_contiguous(TensorInfo& info) {
    if (info.given() && !info.rows_contiguous()) {
      info = keep(info.name, stable::contiguous(tensor_of(info)));
    }
  }

 private:
  StableIValue* next_;
  std::vector<Tensor> tensors_;
};

// ---- allocation, device, stream

struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};

// A new contiguous tensor.
class Buffer {
 public:
  Buffer(const int64_t* sizes, int ndim, ScalarType type, const TensorInfo& like) {
    std::array<int64_t, 8> strides{};
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      strides[i] = stride;
      stride *= sizes[i] > 0 ? sizes[i] : 1;
    }
    const int32_t device = like.device == DeviceType::kCuda ? aoti_torch_device_type_cuda()
                                                            : aoti_torch_device_type_cpu();
    AtenTensorHandle handle = nullptr;
    check_torch(aoti_torch_empty_strided(ndim, sizes, strides.data(), code_of(type), device,
                                         like.device_index, &handle));
    handle_.reset(handle);
  }
  Buffer(std::initializer_list<int64_t> sizes, ScalarType type, const TensorInfo& like)
      : Buffer(sizes.begin(), static_cast<int>(sizes.size()), type, like) {}

  // Without elements, but with a storage of its own: torch takes two tensors without one for
  // aliases of each other, which results of an op must not be.
  static Buffer empty(ScalarType type, const TensorInfo& like) {
    Buffer one({1}, type, like);
    const int64_t size = 0, stride = 1;
    AtenTensorHandle handle = nullptr;
    check_torch(aoti_torch__reinterpret_tensor(one.handle_.get(), 1, &size, &stride, 0, &handle));
    one.handle_.reset(handle);
    return one;
  }

  template <class T = void>
  T* data() const {
    void* data = nullptr;
    check_torch(aoti_torch_get_data_ptr(handle_.get(), &data));
    return static_cast<T*>(data);
  }
  void zero() { check_torch(aoti_torch_zero_(handle_.get())); }
  void fill(double value) { check_torch(aoti_torch_aten_fill__Scalar(handle_.get(), value)); }
  StableIValue release() { return stable::detail::from(handle_.release()); }

 private:
  std::unique_ptr<AtenTensorOpaque, DeleteTensor> handle_;
};

inline Buffer like(const TensorInfo& t, ScalarType type) {
  return Buffer(t.sizes, t.ndim, type, t);
}

inline Buffer bytes(size_t size, const TensorInfo& like) {
  return Buffer({static_cast<int64_t>(size)}, ScalarType::kUInt8, like);
}

inline cudaStream_t current_stream(int device_index) {
  // libtorch_cuda is no library that this one links: a torch without CUDA has none.
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* symbol = torch_cuda ? dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<GetStream>(symbol);
  }();
  if (get_stream == nullptr) throw std::runtime_error("this torch was built without CUDA");
  void* stream = nullptr;
  check_torch(get_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Where a call runs: its kernels, and on a GPU the device, current while this lives, and stream.
template <bool kEmulated>
struct Place {
  explicit Place(const TensorInfo& q) {
    if constexpr (kEmulated) {
      kernels = emulated_kernels();
    } else {
      kernels = kernels_for_gpu(device_info(q.device_index), q);
      guard = std::make_unique<DeviceGuard>(q.device_index);
      stream = current_stream(q.device_index);
    }
  }
  Kernels kernels;
  std::unique_ptr<DeviceGuard> guard;
  cudaStream_t stream = nullptr;
};

}  // namespace flash_cuda
