// The arguments of the ops as plain data: what torch_tensors.h reads off tensors, what
// module.cpp reads off Python objects, and all that api/ ever sees of either.
#pragma once

#include <cstdint>

namespace flash_cuda {

enum class ScalarType : int {
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat32,
  kFloat64,
  kInt32,
  kInt64,
  kFloat8E5M2,
  kInt8,
  kUInt8,
  kInt16,
  kBool,
  // No op takes what follows; errors name it.
  kUInt16,
  kUInt32,
  kUInt64,
  kComplex32,
  kComplex64,
  kComplex128,
  kFloat8E4M3Fnuz,
  kFloat8E5M2Fnuz,
  kOther,
};

// The name that Python users know ("float16"), for errors.
const char* name_of(ScalarType type);
int bytes_of(ScalarType type);

enum class DeviceType : int { kCpu, kCuda, kMeta, kOther };

// A tensor, borrowed: sizes and strides (in elements) belong to the caller.
struct TensorInfo {
  const char* name = "";
  const void* data = nullptr;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  int ndim = -1;  // -1: the optional tensor was not given
  ScalarType dtype = ScalarType::kOther;
  DeviceType device = DeviceType::kCpu;
  int device_index = -1;

  bool given() const { return ndim >= 0; }
  int64_t size(int dim) const { return sizes[dim < 0 ? dim + ndim : dim]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= sizes[i];
    return n;
  }
  // The stride of a dimension of one element (or none) means nothing and may be any number; the
  // one that a contiguous tensor would have is given instead.
  int64_t stride(int dim) const {
    if (dim < 0) dim += ndim;
    if (sizes[dim] > 1) return strides[dim];
    return dim == ndim - 1 ? 1 : sizes[dim + 1] * stride(dim + 1);
  }
  // The stride of a single column says nothing; torch's contiguous() leaves it, whatever it is.
  bool rows_contiguous() const { return ndim <= 0 || size(-1) <= 1 || stride(-1) == 1; }
  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

constexpr int64_t kNotGiven = INT64_MIN;  // of an optional integer

struct FwdArgs {
  TensorInfo q, k, v;
  TensorInfo bias, alibi_slopes, sink;
  TensorInfo cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k;
  TensorInfo block_table, cache_batch_idx, qv;
  TensorInfo q_descale, k_descale, v_descale, rng_state;
  bool has_softmax_scale = false;
  double softmax_scale = 0.0;
  int64_t window_left = -1, window_right = -1;
  int64_t attention_chunk = 0;
  bool top_left = false;
  double softcap = 0.0;
  double dropout_p = 0.0;
  int64_t num_splits = 0;  // 0: chosen by plan.h
  int64_t split_size = 0;  // 0: not fixed
  int64_t pack_gqa = -1;   // -1: chosen by plan.h
  bool strict = false;
  int64_t max_seqlen_q = kNotGiven, max_seqlen_k = kNotGiven;
};

// `fwd` describes the forward call; what only inference uses is not given.
struct BwdArgs {
  FwdArgs fwd;
  TensorInfo dout, dlse, out, lse;
  bool deterministic = false;
  int64_t wanted = 7;
};

struct CombineArgs {
  TensorInfo out_partial;  // (splits, batch, seqlen, heads, head_dim_v)
  TensorInfo lse_partial;  // (splits, batch, heads, seqlen)
  bool has_dtype = false;
  ScalarType dtype = ScalarType::kFloat32;
};

struct KvAppendArgs {
  TensorInfo k_cache, v_cache, k, v, cache_seqlens;
  TensorInfo block_table, cache_batch_idx, rotary_cos, rotary_sin;
  bool rotary_interleaved = true;
};

// Calls `visit` with each tensor, given or not, in the order of the schema.
template <class Visit>
void for_each_tensor(FwdArgs& a, Visit visit) {
  for (TensorInfo* t :
       {&a.q, &a.k, &a.v, &a.bias, &a.alibi_slopes, &a.sink, &a.cu_seqlens_q, &a.cu_seqlens_k,
        &a.seqused_q, &a.seqused_k, &a.leftpad_k, &a.block_table, &a.cache_batch_idx, &a.qv,
        &a.q_descale, &a.k_descale, &a.v_descale, &a.rng_state}) {
    visit(*t);
  }
}

}  // namespace flash_cuda
