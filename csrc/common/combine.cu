// Merges the partial results of split-KV attention.
//
// One thread block serves one row of one head. Its warps take every fourth part each and are added
// up in a fixed order, so that parts without keys, however many, never change a bit.
#include <cuda_runtime.h>

#include "common/decode_passes.h"
#include "common/launch_kernel.h"
#include "common/softmax.cuh"
#include "ptx/convert.h"

namespace flash_cuda {

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// max or sum over the block; every thread gets the same bits.
template <class Op>
__device__ __forceinline__ float block_reduce(float x, float (&scratch)[kWarps], Op op) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, i));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) x = op(x, scratch[w]);
  __syncthreads();  // scratch may be written again
  return x;
}

__device__ __forceinline__ void store_element(void* out, DType dtype, int64_t i, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(out)[i] = x;
  } else {
    static_cast<uint16_t*>(out)[i] = dtype == DType::kFloat16
                                         ? ptx::from_float<DType::kFloat16>(x)
                                         : ptx::from_float<DType::kBFloat16>(x);
  }
}

// Four columns of a row of a partial result; `vectors`: 16-byte aligned and within the row.
__device__ __forceinline__ float4 load_columns(const float* row, int col, int width, bool vectors) {
  if (vectors) return *reinterpret_cast<const float4*>(row + col);
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = col + j < width ? row[col + j] : 0.0f;
  return make_float4(v[0], v[1], v[2], v[3]);
}

__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams p, const bool vectors) {
  __shared__ float scratch[kWarps];
  __shared__ float4 partial[kWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.x / p.num_heads, head = blockIdx.x - row * p.num_heads;
  const int b = row / p.seqlen, q = row - b * p.seqlen;

  const float* lse =
      p.lse_partial + b * p.lp_batch_stride + head * p.lp_head_stride + q * p.lp_row_stride;
  float largest = -INFINITY;
  for (int s = threadIdx.x; s < p.num_splits; s += kThreads) {
    largest = fmaxf(largest, lse[s * p.lp_split_stride]);
  }
  largest = block_reduce(largest, scratch, [](float x, float y) { return fmaxf(x, y); });
  const float base = largest == -INFINITY ? 0.0f : largest;
  const auto weight_of = [&](int s) {
    return ptx::ex2((lse[s * p.lp_split_stride] - base) * kLog2e);
  };
  float total = 0.0f;
  for (int s = threadIdx.x; s < p.num_splits; s += kThreads) total += weight_of(s);
  total = block_reduce(total, scratch, [](float x, float y) { return x + y; });
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  if (threadIdx.x == 0) {
    p.lse[b * p.lse_batch_stride + head * p.lse_head_stride + q] =
        total > 0.0f ? base + logf(total) : -INFINITY;
  }

  const float* in =
      p.out_partial + b * p.op_batch_stride + q * p.op_row_stride + head * p.op_head_stride;
  const int64_t out_row = b * p.out_stride.batch + q * p.out_stride.row + head * p.out_stride.head;
  for (int col0 = 0; col0 < p.head_dim_v; col0 += 128) {
    const int col = col0 + lane * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (col < p.head_dim_v) {
#pragma unroll 4
      for (int s = warp; s < p.num_splits; s += kWarps) {
        const float weight = weight_of(s);
        if (weight == 0.0f) continue;  // nothing, or never written
        const float4 v = load_columns(in + s * p.op_split_stride, col, p.head_dim_v, vectors);
        sum.x = fmaf(weight, v.x, sum.x);
        sum.y = fmaf(weight, v.y, sum.y);
        sum.z = fmaf(weight, v.z, sum.z);
        sum.w = fmaf(weight, v.w, sum.w);
      }
    }
    partial[warp][lane] = sum;
    __syncthreads();
    const int mine = col0 + threadIdx.x;
    if (mine < p.head_dim_v) {
      float x = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        x += reinterpret_cast<const float*>(partial[w])[threadIdx.x];
      }
      store_element(p.out, p.out_dtype, out_row + mine, x * inverse);
    }
    __syncthreads();  // partial may be written again
  }
}

}  // namespace

void launch_combine(const CombineParams& p, cudaStream_t stream) {
  const bool vectors = reinterpret_cast<uintptr_t>(p.out_partial) % 16 == 0 &&
                       p.head_dim_v % 4 == 0 && p.op_split_stride % 4 == 0 &&
                       p.op_batch_stride % 4 == 0 && p.op_row_stride % 4 == 0 &&
                       p.op_head_stride % 4 == 0;
  const int64_t rows = int64_t{p.batch} * p.seqlen * p.num_heads;
  launch_kernel(combine_kernel, rows, kThreads, 0, stream, p, vectors);
}

}  // namespace flash_cuda
