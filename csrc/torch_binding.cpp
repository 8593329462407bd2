// The ops of flash_cuda and the only C++ file that knows torch (through its stable ABI).
//
// Schemas, reading the arguments, allocation, device and stream; what a call means, which kernel
// serves it and how it is launched is api/. Each op is registered for CUDA tensors over the
// compiled kernels and, as `_NAME_emulated`, for CPU tensors over a library that
// `_C.load_emulated` has loaded. CPU tensors of the public ops go to flash_cuda/reference, and
// fakes, autograd, autocast and vmap are added from flash_cuda/_ops.py.
//
// Errors: a refusal leaves an op as std::invalid_argument, which torch turns into a ValueError with
// the bare text. Which error it would rather be, ValueError, TypeError or NotImplementedError, the
// Python functions learn from `_C.refusal_type(text)`, called in the same thread with that text.
// Anything else that is thrown (CUDA, an emulated deadlock) arrives as a RuntimeError.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "api/args.h"
#include "api/calls.h"
#include "api/check.h"
#include "api/device.h"
#include "api/dispatch.h"
#include "api/read_args.h"

namespace flash_cuda {
namespace {

namespace stable = torch::stable;
using stable::Tensor;
using stable::accelerator::DeviceGuard;

// The C functions of torch report by a code; their own macro for it changed its name in 2.12.
void check_torch(AOTITorchError code) {
  if (code != AOTI_TORCH_SUCCESS) throw std::runtime_error("a call of torch's C API failed");
}

constexpr const char* kFwdSchema =
    "(Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? alibi_slopes=None, "
    "Tensor? sink=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? leftpad_k=None, "
    "Tensor? block_table=None, Tensor? cache_batch_idx=None, Tensor? qv=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "Tensor? rng_state=None, float? softmax_scale=None, int window_left=-1, int window_right=-1, "
    "int attention_chunk=0, bool top_left=False, float softcap=0.0, float dropout_p=0.0, "
    "int num_splits=0, int split_size=0, int pack_gqa=-1, bool strict=False, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None) -> (Tensor out, Tensor lse)";

// `fwd` for a call that leaves the rest at its defaults: torch takes 0.1 us for every argument of a
// schema, given or not. Not public; _autograd.py calls it where nobody can tell the difference.
constexpr const char* kFwdDenseSchema =
    "(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, int window_left=-1, "
    "int window_right=-1) -> (Tensor out, Tensor lse)";

// dq, dk, dv have the dtype and shape of q, k, v; dbias the shape of bias and dsink of sink, both
// float32 (float64 for float64 inputs). All are contiguous; what `wanted` leaves out is empty,
// (0,).
constexpr const char* kBwdSchema =
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? bias=None, Tensor? alibi_slopes=None, Tensor? sink=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "Tensor? rng_state=None, float? softmax_scale=None, int window_left=-1, int window_right=-1, "
    "int attention_chunk=0, bool top_left=False, float softcap=0.0, float dropout_p=0.0, "
    "bool strict=False, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "bool deterministic=False, int wanted=7) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)";

constexpr const char* kCombineSchema =
    "(Tensor out_partial, Tensor lse_partial, ScalarType? dtype=None) -> (Tensor out, Tensor lse)";

constexpr const char* kKvAppendSchema =
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    "Tensor? block_table=None, Tensor? cache_batch_idx=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, bool rotary_interleaved=True) -> ()";

// ---- reading arguments

constexpr int kMaxTypes = 64;  // numbers of torch's dtypes are below

const std::array<ScalarType, kMaxTypes>& scalar_types() {
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

ScalarType scalar_type_of(int32_t code) {
  return code >= 0 && code < kMaxTypes ? scalar_types()[code] : ScalarType::kOther;
}

int32_t code_of(ScalarType type) {
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

DeviceType device_type_of(int32_t code) {
  if (code == aoti_torch_device_type_cuda()) return DeviceType::kCuda;
  if (code == aoti_torch_device_type_cpu()) return DeviceType::kCpu;
  return code == aoti_torch_device_type_meta() ? DeviceType::kMeta : DeviceType::kOther;
}

TensorInfo describe(const char* name, const Tensor& tensor) {
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

Buffer like(const TensorInfo& t, ScalarType type) { return Buffer(t.sizes, t.ndim, type, t); }

Buffer bytes(size_t size, const TensorInfo& like) {
  return Buffer({static_cast<int64_t>(size)}, ScalarType::kUInt8, like);
}

cudaStream_t current_stream(int device_index) {
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

// Copies tensors to the host, which waits for the GPU.
void fetch(ArgReader& in, std::initializer_list<TensorInfo*> tensors) {
  for (TensorInfo* t : tensors) {
    if (!t->given() || t->device == DeviceType::kCpu) continue;
    const stable::Device cpu(torch::headeronly::DeviceType::CPU, 0);
    *t = in.keep(t->name, stable::to(in.tensor_of(*t), cpu));
  }
}

// The checks of values, in the debug mode.
void check_values(ArgReader& in, FwdArgs a, const Sizes& sizes) {
  if (!debug_mode()) return;
  fetch(in, {&a.cu_seqlens_q, &a.cu_seqlens_k, &a.seqused_q, &a.seqused_k, &a.leftpad_k,
             &a.block_table, &a.cache_batch_idx});
  check_lengths(a, sizes);
}
void check_values(ArgReader& in, KvAppendArgs a) {
  if (!debug_mode()) return;
  fetch(in, {&a.cache_seqlens, &a.block_table, &a.cache_batch_idx});
  check_append_lengths(a);
}

// ---- keys without a single row
//
// Where a sink makes the result more than zeros, a kernel has to run. It is given one row of
// keys that no sequence counts.
class NoKeys {
 public:
  NoKeys(FwdArgs& a, Sizes& s)
      : rows_(Buffer({s.num_heads_kv * std::max(s.head_dim, s.head_dim_v)}, a.q.dtype, a.q)),
        used_(Buffer({s.batch}, ScalarType::kInt32, a.q)),
        sizes_{s.batch, 1, s.num_heads_kv, s.head_dim},
        sizes_v_{s.batch, 1, s.num_heads_kv, s.head_dim_v},
        used_size_{s.batch} {
    rows_.zero();
    used_.zero();
    const auto tensor = [](TensorInfo& t, const void* data, int ndim, const int64_t* sizes,
                           const int64_t* strides) {
      t.data = data;
      t.ndim = ndim;
      t.sizes = sizes;
      t.strides = strides;
    };
    tensor(a.k, rows_.data(), 4, sizes_, strides_);
    tensor(a.v, rows_.data(), 4, sizes_v_, strides_v_);
    strides_[2] = s.head_dim;
    strides_v_[2] = s.head_dim_v;
    a.seqused_k = a.q;
    a.seqused_k.name = "seqused_k";
    a.seqused_k.dtype = ScalarType::kInt32;
    tensor(a.seqused_k, used_.data(), 1, used_size_, unit_stride_);
    a.cu_seqlens_k = a.leftpad_k = a.block_table = a.cache_batch_idx = a.bias = TensorInfo{};
    s.seqlen_kv = 1;
    s.total_kv = s.batch;
    s.page_size = s.num_pages = 0;
  }

 private:
  Buffer rows_, used_;
  int64_t sizes_[4], sizes_v_[4], used_size_[1];
  int64_t strides_[4] = {0, 0, 0, 1}, strides_v_[4] = {0, 0, 0, 1}, unit_stride_[1] = {1};
};

// ---- the ops

void run_fwd(FwdCall& call, const FwdArgs& a, void* out, float* lse, cudaStream_t stream) {
  FwdParams& p = call.params;
  p.out = out;
  p.lse = lse;
  std::vector<Buffer> held;  // freed after the launch, in the order of the stream
  if (call.combine != nullptr) {
    held.push_back(Buffer({call.out_partial_numel}, ScalarType::kFloat32, a.q));
    p.out_partial = held.back().data<float>();
    held.push_back(Buffer({call.lse_partial_numel}, ScalarType::kFloat32, a.q));
    p.lse_partial = held.back().data<float>();
    if (a.cu_seqlens_q.given()) held.back().fill(-INFINITY);  // rows behind the last sequence
  }
  if (call.workspace_bytes > 0) {
    held.push_back(bytes(call.workspace_bytes, a.q));
    p.workspace = held.back().data();
  }
  launch(call, stream);
}

template <bool kEmulated, FwdArgs (*kRead)(ArgReader&) = read_fwd<ArgReader>>
void fwd(StableIValue* stack) {
  ArgReader in(stack);
  FwdArgs a = kRead(in);
  Sizes s = check_fwd(a);
  check_values(in, a, s);
  const Place<kEmulated> place(a.q);
  const ScalarType out_type = out_dtype_of(a.q);
  const bool packed = a.cu_seqlens_q.given();
  Buffer out = packed ? Buffer({s.total_q, s.num_heads_q, s.head_dim_v}, out_type, a.q)
                      : Buffer({s.batch, a.q.size(1), s.num_heads_q, s.head_dim_v}, out_type, a.q);
  Buffer lse = packed ? Buffer({s.num_heads_q, s.total_q}, ScalarType::kFloat32, a.q)
                      : Buffer({s.batch, s.num_heads_q, a.q.size(1)}, ScalarType::kFloat32, a.q);
  if (!has_queries(s) || (!has_keys(s) && !a.sink.given())) {
    out.zero();
    lse.fill(-INFINITY);
  } else {
    std::optional<NoKeys> no_keys;
    if (!has_keys(s)) no_keys.emplace(a, s);
    FwdCall call = prepare_fwd(a, s, place.kernels);
    run_fwd(call, a, out.data(), lse.data<float>(), place.stream);
  }
  stack[0] = out.release();
  stack[1] = lse.release();
}

void fwd_dense(StableIValue* stack) { fwd<false, read_fwd_dense<ArgReader>>(stack); }

// The five results of bwd; one that is not wanted is empty.
struct Gradients {
  Gradients(const BwdArgs& b)
      : dq(make(b, kWantDq, b.fwd.q, b.fwd.q.dtype)),
        dk(make(b, kWantDk, b.fwd.k, b.fwd.k.dtype)),
        dv(make(b, kWantDv, b.fwd.v, b.fwd.v.dtype)),
        dbias(make(b, kWantDbias, b.fwd.bias, ScalarType::kFloat32)),
        dsink(make(b, kWantDsink, b.fwd.sink, ScalarType::kFloat32)) {
    if (b.wanted & kWantDbias) dbias.zero();
    if (b.wanted & kWantDsink) dsink.zero();
  }
  static Buffer make(const BwdArgs& b, int bit, const TensorInfo& t, ScalarType type) {
    return b.wanted & bit ? like(t, type) : Buffer::empty(type, b.fwd.q);
  }
  void set_pointers(BwdParams& p) const {
    if (p.wanted & kWantDq) p.dq = dq.data();
    if (p.wanted & kWantDk) p.dk = dk.data();
    if (p.wanted & kWantDv) p.dv = dv.data();
    if (p.wanted & kWantDbias) p.dbias = dbias.data<float>();
    if (p.wanted & kWantDsink) p.dsink = dsink.data<float>();
  }
  void zero_qkv() {
    dq.zero();
    dk.zero();
    dv.zero();
  }
  Buffer dq, dk, dv, dbias, dsink;
};

template <bool kEmulated>
void bwd(StableIValue* stack) {
  ArgReader in(stack);
  BwdArgs b = read_bwd(in);
  Sizes s = check_bwd(b);
  check_values(in, b.fwd, s);
  const Place<kEmulated> place(b.fwd.q);
  for (TensorInfo* t : {&b.dout, &b.dlse, &b.out, &b.lse}) in.make_rows_contiguous(*t);
  Gradients gradients(b);
  std::optional<NoKeys> no_keys;
  if (!has_queries(s) || !has_keys(s)) {
    gradients.zero_qkv();
    // Without keys only the sink is left, and lse depends on it.
    b.wanted = has_queries(s) && b.dlse.given() ? b.wanted & kWantDsink : 0;
    if (b.wanted) no_keys.emplace(b.fwd, s);
  }
  if (b.wanted) {
    BwdCall call = prepare_bwd(b, s, place.kernels);
    gradients.set_pointers(call.params);
    std::optional<Buffer> workspace;
    if (call.workspace_bytes > 0) {
      workspace.emplace(bytes(call.workspace_bytes, b.fwd.q));
      call.params.workspace = workspace->data();
    }
    launch(call, place.stream);
  }
  int i = 0;
  for (Buffer* g :
       {&gradients.dq, &gradients.dk, &gradients.dv, &gradients.dbias, &gradients.dsink}) {
    stack[i++] = g->release();
  }
}

template <bool kEmulated>
void combine(StableIValue* stack) {
  ArgReader in(stack);
  const CombineArgs a = read_combine(in);
  check_combine(a);
  const Place<kEmulated> place(a.out_partial);
  Buffer out(a.out_partial.sizes + 1, 4, a.dtype, a.out_partial);
  Buffer lse(a.lse_partial.sizes + 1, 3, a.lse_partial.dtype, a.out_partial);
  if (a.out_partial.numel() == 0) {
    out.zero();
    lse.fill(-INFINITY);
  } else {
    kernel_dtype(a.out_partial);  // refuses float64
    if (!place.kernels.combine) refuse_no_kernel(place.kernels, {"combine is not built"});
    TensorInfo result = a.out_partial;
    result.name = "dtype";
    result.dtype = a.dtype;
    place.kernels.combine(combine_params(a, out.data(), kernel_dtype(result), lse.data<float>()),
                          place.stream);
  }
  stack[0] = out.release();
  stack[1] = lse.release();
}

template <bool kEmulated>
void kv_append_(StableIValue* stack) {
  ArgReader in(stack);
  const KvAppendArgs a = read_kv_append(in);
  check_kv_append(a);
  check_values(in, a);
  const Place<kEmulated> place(a.k);
  if (a.k.numel() == 0) return;
  if (!place.kernels.kv_append) refuse_no_kernel(place.kernels, {"kv_append_ is not built"});
  place.kernels.kv_append(kv_append_params(a), place.stream);
}

// The form that torch calls; notes refusals for `_C.refusal_type`.
template <void (*kOp)(StableIValue*)>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  try {
    kOp(stack);
  } catch (const Refusal& refusal) {
    note_refusal(refusal);
    throw;
  }
}

}  // namespace
}  // namespace flash_cuda

STABLE_TORCH_LIBRARY(flash_cuda, m) {
  const struct {
    const char *name, *emulated, *schema;
  } ops[] = {{"fwd", "_fwd_emulated", flash_cuda::kFwdSchema},
             {"bwd", "_bwd_emulated", flash_cuda::kBwdSchema},
             {"combine", "_combine_emulated", flash_cuda::kCombineSchema},
             {"kv_append_", "_kv_append_emulated_", flash_cuda::kKvAppendSchema}};
  for (const auto& op : ops) {
    m.def((std::string(op.name) + op.schema).c_str());
    m.def((std::string(op.emulated) + op.schema).c_str());
  }
  m.def((std::string("_fwd_dense") + flash_cuda::kFwdDenseSchema).c_str());
}

STABLE_TORCH_LIBRARY_IMPL(flash_cuda, CUDA, m) {
  m.impl("fwd", &flash_cuda::boxed<flash_cuda::fwd<false>>);
  m.impl("_fwd_dense", &flash_cuda::boxed<flash_cuda::fwd_dense>);
  m.impl("bwd", &flash_cuda::boxed<flash_cuda::bwd<false>>);
  m.impl("combine", &flash_cuda::boxed<flash_cuda::combine<false>>);
  m.impl("kv_append_", &flash_cuda::boxed<flash_cuda::kv_append_<false>>);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cuda, CPU, m) {
  m.impl("_fwd_emulated", &flash_cuda::boxed<flash_cuda::fwd<true>>);
  m.impl("_bwd_emulated", &flash_cuda::boxed<flash_cuda::bwd<true>>);
  m.impl("_combine_emulated", &flash_cuda::boxed<flash_cuda::combine<true>>);
  m.impl("_kv_append_emulated_", &flash_cuda::boxed<flash_cuda::kv_append_<true>>);
}
