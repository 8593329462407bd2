// New keys and values behind the cached ones, keys rotated on the way.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "common/decode_passes.h"
#include "common/host_device.h"
#include "common/launch_kernel.h"
#include "ptx/convert.h"

namespace flash_cuda {

namespace {

constexpr int kThreads = 128;

template <DType kDType>
struct Element {
  uint16_t bits;
  __device__ float to_float() const { return ptx::to_float<kDType>(bits); }
  __device__ static Element from_float(float x) { return {ptx::from_float<kDType>(x)}; }
};
template <>
struct Element<DType::kFloat32> {
  float value;
  __device__ float to_float() const { return value; }
  __device__ static Element from_float(float x) { return {x}; }
};
template <>
struct Element<DType::kFloat8E4M3> {
  __nv_fp8_storage_t bits;
  __device__ float to_float() const {
    const __half h(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3));
    return __half2float(h);
  }
  __device__ static Element from_float(float x) {
    return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
  }
};

// Element d of a key that stands at `position`.
template <class T>
__device__ __forceinline__ T rotated(const KvAppendParams& p, const T* k, int d, int position) {
  if (d >= p.rotary_dim) return k[d];
  const int half = p.rotary_dim / 2;
  const int pair = p.rotary_interleaved ? d / 2 : d % half;
  const bool second = p.rotary_interleaved ? d % 2 != 0 : d >= half;
  const int partner = p.rotary_interleaved ? d ^ 1 : (second ? d - half : d + half);
  // The tables end somewhere; what lies behind takes their last row.
  const int at = min_of(max_of(position, 0), p.rotary_positions - 1);
  const int64_t entry = static_cast<int64_t>(at) * half + pair;
  const float c = static_cast<const T*>(p.rotary_cos)[entry].to_float();
  const float s = static_cast<const T*>(p.rotary_sin)[entry].to_float();
  const float x = k[d].to_float(), y = k[partner].to_float();
  return T::from_float(__fadd_rn(__fmul_rn(x, c), __fmul_rn(second ? y : -y, s)));
}

// One thread block serves one new row of one head.
template <DType kDType>
__global__ void __launch_bounds__(kThreads)
    kv_append_kernel(const __grid_constant__ KvAppendParams p) {
  using T = Element<kDType>;
  const int row = blockIdx.x / p.num_heads_kv, head = blockIdx.x - row * p.num_heads_kv;
  const int b = row / p.seqlen_new, i = row - b * p.seqlen_new;
  const int position = p.cache_seqlens[b] + i;
  if (position < 0 || position >= p.capacity) return;  // there is no such place
  int64_t place = p.cache_batch_idx ? p.cache_batch_idx[b] : b;
  int in_place = position;
  if (p.block_table) {
    const int page = position / p.page_size;
    place = p.block_table[b * p.block_table_stride + page];
    in_place = position - page * p.page_size;
  }
  const T* k = static_cast<const T*>(p.k) + b * p.k_stride.batch + i * p.k_stride.row +
               head * p.k_stride.head;
  const T* v = static_cast<const T*>(p.v) + b * p.v_stride.batch + i * p.v_stride.row +
               head * p.v_stride.head;
  T* k_cache = static_cast<T*>(p.k_cache) + place * p.k_cache_stride.batch +
               in_place * p.k_cache_stride.row + head * p.k_cache_stride.head;
  T* v_cache = static_cast<T*>(p.v_cache) + place * p.v_cache_stride.batch +
               in_place * p.v_cache_stride.row + head * p.v_cache_stride.head;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    k_cache[d] = rotated(p, k, d, position);
  }
  for (int d = threadIdx.x; d < p.head_dim_v; d += kThreads) v_cache[d] = v[d];
}

}  // namespace

void launch_kv_append(const KvAppendParams& p, cudaStream_t stream) {
  const auto kernel = p.dtype == DType::kFloat16    ? kv_append_kernel<DType::kFloat16>
                      : p.dtype == DType::kBFloat16 ? kv_append_kernel<DType::kBFloat16>
                      : p.dtype == DType::kFloat32  ? kv_append_kernel<DType::kFloat32>
                                                    : kv_append_kernel<DType::kFloat8E4M3>;
  const int64_t rows = int64_t{p.batch} * p.seqlen_new * p.num_heads_kv;
  launch_kernel(kernel, rows, kThreads, 0, stream, p);
}

}  // namespace flash_cuda
