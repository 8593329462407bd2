// Before the backward main loop: what it needs of every query row, in tiles of its own size.
//
// One thread block serves one tile of block_q rows of one head; eight lanes share a row.
#include <cuda_runtime.h>

#include "common/bwd_rows.h"
#include "common/bwd_workspace.h"
#include "common/launch_kernel.h"
#include "common/seqlen.h"
#include "common/softmax.cuh"
#include "ptx/convert.h"

namespace flash_cuda {
namespace {

constexpr int kThreads = 128, kLanesPerRow = 8;

// Eight products of 16-bit elements, in fp32.
template <DType kDType>
__device__ __forceinline__ float dot8(const uint16_t* a, const uint16_t* b, bool unaligned) {
  float sum = 0.0f;
  if (unaligned) {
    for (int i = 0; i < 8; ++i) sum += ptx::to_float<kDType>(a[i]) * ptx::to_float<kDType>(b[i]);
    return sum;
  }
  const uint4 x = *reinterpret_cast<const uint4*>(a), y = *reinterpret_cast<const uint4*>(b);
  const uint32_t u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = ptx::unpack<kDType>(u[i]), g = ptx::unpack<kDType>(v[i]);
    sum = fmaf(f.x, g.x, fmaf(f.y, g.y, sum));
  }
  return sum;
}

template <DType kDType>
__global__ void __launch_bounds__(kThreads)
    bwd_preprocess_kernel(const __grid_constant__ BwdParams p, const BwdWorkspace ws) {
  const FwdParams& f = p.fwd;
  const int head = blockIdx.x / ws.tiles, tile = blockIdx.x - head * ws.tiles;
  WorkTile work;
  if (f.cu_seqlens_q) {
    work =
        find_packed_block(f.cu_seqlens_q, f.batch, static_cast<int>(f.total_q), ws.block_q, tile);
  } else {
    const int b = tile / ws.tiles_per_sequence;
    work = {b, head, tile - b * ws.tiles_per_sequence, true};
  }
  const int64_t place = head * ws.tiles + tile;
  if (!work.valid) {  // a place between two packed sequences
    for (int row = threadIdx.x; row < ws.block_q; row += kThreads) {
      ws.lse_log2[place * ws.block_q + row] = INFINITY;
      ws.row_dot[place * ws.block_q + row] = 0.0f;
    }
    return;
  }
  const SeqInfo seq = seq_info_or_tail(f, work.batch);

  const uint16_t* out = static_cast<const uint16_t*>(f.out) + seq.q_batch * p.out_stride.batch +
                        head * p.out_stride.head;
  const uint16_t* dout = static_cast<const uint16_t*>(p.dout) + seq.q_batch * p.dout_stride.batch +
                         head * p.dout_stride.head;
  const int lane = threadIdx.x % kLanesPerRow;
  for (int row = threadIdx.x / kLanesPerRow; row < ws.block_q; row += kThreads / kLanesPerRow) {
    const int q = work.block * ws.block_q + row;
    float dot = 0.0f, lse_log2 = INFINITY;
    if (q < seq.seqlen_q) {
      const int64_t r = seq.q_row0 + q;
      for (int d = lane * 8; d < f.head_dim_v; d += kLanesPerRow * 8) {
        dot += dot8<kDType>(out + r * p.out_stride.row + d, dout + r * p.dout_stride.row + d,
                            f.unaligned);
      }
      const float lse = f.lse[seq.q_batch * f.lse_batch_stride + head * f.lse_head_stride + r];
      const bool used = has_gradient(lse);
      if (used) lse_log2 = lse * kLog2e;
      if (p.dlse && lane == 0) {
        const float dlse =
            p.dlse[seq.q_batch * p.dlse_batch_stride + head * p.dlse_head_stride + r];
        if (used) dot -= dlse;
      }
    }
#pragma unroll
    for (int i = 1; i < kLanesPerRow; i *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, i);
    if (lane == 0) {
      ws.lse_log2[place * ws.block_q + row] = lse_log2;
      ws.row_dot[place * ws.block_q + row] = lse_log2 == INFINITY ? 0.0f : dot;
    }
  }
  if (ws.dq && ws.copies == 0) {
    float4* dq = reinterpret_cast<float4*>(ws.dq + place * ws.block_q * ws.head_dim);
    for (int i = threadIdx.x; i < ws.block_q * ws.head_dim / 4; i += kThreads) {
      dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  if (ws.turn && threadIdx.x < ws.turns) ws.turn[place * ws.turns + threadIdx.x] = 0;
}

constexpr int kSinkThreads = 256;

// dsink = -sum over rows of exp(sink - lse) * row_dot, one thread block a head, in a fixed order.
__global__ void __launch_bounds__(kSinkThreads)
    bwd_sink_kernel(const __grid_constant__ BwdParams p, const BwdWorkspace ws) {
  __shared__ float partial[kSinkThreads];
  const int64_t rows = ws.tiles * ws.block_q, first = blockIdx.x * rows;
  const float sink_log2 = p.fwd.sink[blockIdx.x] * kLog2e;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < rows; i += kSinkThreads) {
    // Places without a row have lse +inf.
    sum -= ptx::ex2(sink_log2 - ws.lse_log2[first + i]) * ws.row_dot[first + i];
  }
  partial[threadIdx.x] = sum;
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) p.dsink[blockIdx.x] = partial[0];
}

}  // namespace

void launch_bwd_sink(const BwdParams& p, const BwdWorkspace& ws, cudaStream_t stream) {
  launch_kernel(bwd_sink_kernel, p.fwd.num_heads_q, kSinkThreads, 0, stream, p, ws);
}

void launch_bwd_preprocess(const BwdParams& p, const BwdWorkspace& ws, cudaStream_t stream) {
  const auto kernel = p.fwd.dtype == DType::kFloat16 ? bwd_preprocess_kernel<DType::kFloat16>
                                                     : bwd_preprocess_kernel<DType::kBFloat16>;
  launch_kernel(kernel, ws.tiles * p.fwd.num_heads_q, kThreads, 0, stream, p, ws);
}

}  // namespace flash_cuda
