// The short kernels around the backward: what the main kernel needs of each row before it, and the
// conversion of the dQ sums after it.
#pragma once

#include "common/bwd_rows.h"
#include "common/log2.h"
#include "common/seqlen.h"
#include "ptx/convert.h"
#include "ptx/griddep.h"
#include "sm90/bwd_tile.h"
#include "sm90/bwd_work.cuh"

namespace flash_cuda::sm90 {

constexpr int kPassThreads = 256;

// A row block of the workspace: its sequence, and its first row in it.
struct RowBlock {
  SeqInfo seq;
  int row0;
};

template <class Tile>
__device__ __forceinline__ RowBlock row_block(const FwdParams& p, int64_t index) {
  int b, block;
  if (p.cu_seqlens_q) {
    b = sequence_of_block(p.cu_seqlens_q, p.batch, index, Tile::kBlockQ);
    block = static_cast<int>(index - row_block_base(p, b, Tile::kBlockQ));
  } else {
    const int blocks = ceil_div(p.seqlen_q, Tile::kBlockQ);
    b = static_cast<int>(index / blocks);
    block = static_cast<int>(index - int64_t(b) * blocks);
  }
  return {seq_info(p, b), block * Tile::kBlockQ};
}

// Row blocks backwards: what the pre-pass reads last is what the main kernel wants first, and what
// that adds to last is what the post-pass wants first, while it is in the L2 cache.
__device__ __forceinline__ unsigned last_first() { return gridDim.x - 1 - blockIdx.x; }

// Zeroes the rows [begin, end) of a packed gradient; blocks take turns.
__device__ __forceinline__ void zero_rows(void* out, Stride stride, int64_t begin, int64_t end,
                                          int heads, int head_dim) {
  if (!out) return;
  const int chunks = heads * (head_dim / 8);
  for (int64_t row = begin + blockIdx.x; row < end; row += gridDim.x) {
    for (int i = threadIdx.x; i < chunks; i += blockDim.x) {
      const int head = i / (head_dim / 8), chunk = i % (head_dim / 8);
      *reinterpret_cast<uint4*>(static_cast<char*>(out) +
                                2 * (row * stride.row + head * stride.head) + chunk * 16) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// Sum of the products of eight 16-bit pairs.
template <DType kDType>
__device__ __forceinline__ float dot8(uint4 a, uint4 b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = ptx::unpack<kDType>(x[i]), w = ptx::unpack<kDType>(y[i]);
    sum = fmaf(u.x, w.x, fmaf(u.y, w.y, sum));
  }
  return sum;
}

// Packed sequences in the order of their tasks, the longest first, so that the call ends with short
// ones. One block.
template <class Tile>
__device__ __forceinline__ void rank_sequences(const BwdArgs& args) {
  const FwdParams& p = args.params.fwd;
  const BwdWorkspace& work = args.work;
  if (!work.sequences) return;
  const auto blocks_of = [&](int b) {
    return ceil_div(max_of(p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b], 0), Tile::kBlockKV);
  };
  const auto queries_of = [&](int b) {
    return p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.seqlen_q;
  };
  for (int mine = threadIdx.x; mine < p.batch; mine += kPassThreads) {
    const int queries = queries_of(mine);
    int rank = 0, first = 0;
    for (int b = 0; b < p.batch; ++b) {
      const int other = queries_of(b);
      if (other < queries || (other == queries && b >= mine)) continue;
      ++rank;
      first += blocks_of(b);
    }
    work.sequences[rank] = mine;
    work.first_blocks[rank] = first;
    if (rank == p.batch - 1) work.first_blocks[p.batch] = first + blocks_of(mine);
  }
}

// lse2 and -delta of every row, zeroed dQ sums and turns; zero gradients for packed rows past the
// last sequence. One block a row block and head.
template <class Tile, DType kDType>
__global__ void __launch_bounds__(kPassThreads)
    bwd_pre_kernel(const __grid_constant__ BwdArgs args) {
  // A row: 16 bytes a lane, in groups that the shuffles can halve.
  constexpr int kLanes = Tile::kHeadDim > 128 ? 32 : Tile::kHeadDim > 64 ? 16 : 8;
  constexpr int kRows = kPassThreads / kLanes;
  const BwdParams& params = args.params;
  const FwdParams& p = params.fwd;
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();

  const unsigned number = last_first();
  const int64_t index = number / p.num_heads_q;
  const int head = number % p.num_heads_q;
  const RowBlock block = row_block<Tile>(p, index);
  const SeqInfo& s = block.seq;
  const int lane = threadIdx.x % kLanes;
  const int64_t work_row = (head * args.work.row_blocks + index) * Tile::kBlockQ;

  // Loaded before and stored after the rows, neighbours together.
  __shared__ float deltas[Tile::kBlockQ];
  const int mine = block.row0 + threadIdx.x;
  const bool have_row = threadIdx.x < Tile::kBlockQ && mine < s.seqlen_q;
  float lse = -INFINITY, dlse = 0.0f;
  if (have_row) {
    lse = p.lse[s.q_batch * p.lse_batch_stride + head * p.lse_head_stride + s.q_row0 + mine];
    if (params.dlse) {
      dlse = params.dlse[s.q_batch * params.dlse_batch_stride + head * params.dlse_head_stride +
                         s.q_row0 + mine];
    }
  }
  const char* const out = static_cast<const char*>(p.out) + lane * 16 +
                          2 * (s.q_batch * params.out_stride.batch + head * params.out_stride.head);
  const char* const dout =
      static_cast<const char*>(params.dout) + lane * 16 +
      2 * (s.q_batch * params.dout_stride.batch + head * params.dout_stride.head);
  for (int r = threadIdx.x / kLanes; r < Tile::kBlockQ; r += kRows) {
    const int row = block.row0 + r;
    float delta = 0.0f;
    if (row < s.seqlen_q && lane * 8 < p.head_dim_v) {
      const int64_t at = 2 * int64_t(s.q_row0 + row);
      delta = dot8<kDType>(*reinterpret_cast<const uint4*>(out + at * params.out_stride.row),
                           *reinterpret_cast<const uint4*>(dout + at * params.dout_stride.row));
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      delta += __shfl_xor_sync(0xffffffff, delta, offset);
    }
    if (lane == 0) deltas[r] = delta;
  }
  __syncthreads();
  if (threadIdx.x < Tile::kBlockQ) {
    // With +inf the probabilities of a row without gradient come out as 0, not NaN, whatever dlse
    // says.
    const bool empty = !has_gradient(lse);
    args.work.lse2[work_row + threadIdx.x] = empty ? INFINITY : lse * kLog2e;
    args.work.delta[work_row + threadIdx.x] = empty ? 0.0f : dlse - deltas[threadIdx.x];
  }
  // The main kernel zeroes the sums of later sections itself.
  if (!args.sections_ahead ||
      args.item_of(s.q_batch, head) < args.first_item_of_section(args.sections_ahead)) {
    float4* sums = reinterpret_cast<float4*>(args.work.dq + work_row * Tile::kHeadDim);
#pragma unroll 4
    for (int i = threadIdx.x; i < Tile::kBlockQ * Tile::kHeadDim / 4; i += kPassThreads) {
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  if (blockIdx.x == 0) {
    rank_sequences<Tile>(args);
    if (threadIdx.x == 0) *args.work.next_task = 0;
    for (int i = threadIdx.x; i < BwdWorkspace::kJoins * args.shares.tasks; i += kPassThreads) {
      args.work.pieces_done[i] = 0;
    }
    if (args.sections_ahead) {
      for (int i = threadIdx.x; i < args.num_sections; i += kPassThreads) {
        args.work.zeroed[i] = args.work.added[i] = 0;
      }
    }
  }
  if (args.work.dq_turn && threadIdx.x < 2) {
    args.work.dq_turn[(head * args.work.row_blocks + index) * 2 + threadIdx.x] = 0;
  }
  if (p.cu_seqlens_q) {
    zero_rows(params.dq, params.dq_stride, p.cu_seqlens_q[p.batch], p.total_q, p.num_heads_q,
              p.head_dim);
  }
  if (p.cu_seqlens_k) {
    const int64_t end = p.cu_seqlens_k[p.batch];
    zero_rows(params.dk, params.dk_stride, end, p.total_kv, p.num_heads_kv, p.head_dim);
    zero_rows(params.dv, params.dv_stride, end, p.total_kv, p.num_heads_kv, p.head_dim_v);
  }
}

// Four lanes with four values each: lane c gets the c-th of all four.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int c) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t &low = v[bit == 1 ? 2 * i : i], &high = v[bit == 1 ? 2 * i + 1 : i + 2];
      const uint32_t other = __shfl_xor_sync(0xffffffff, c & bit ? low : high, bit);
      if (c & bit)
        low = other;
      else
        high = other;
    }
  }
}

// Sums of four groups of 8 columns as the lanes of a quad hold them, two columns of the rows g and
// g + 8 each, to lane c's 8 columns of the c-th group.
template <DType kDType>
__device__ __forceinline__ void convert_quad(uint4 (&rows)[2], const float4 (&v)[4], float scale,
                                             int c) {
  uint32_t packed[2][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    packed[0][j] = ptx::pack<kDType>(v[j].x * scale, v[j].y * scale);
    packed[1][j] = ptx::pack<kDType>(v[j].z * scale, v[j].w * scale);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    transpose_quad(packed[r], c);
    rows[r] = make_uint4(packed[r][0], packed[r][1], packed[r][2], packed[r][3]);
  }
}

// dq = sums * softmax_scale in the tensor's type and layout. One block a row block and head. The
// sums lie as the accumulators did: [part][8-column group][warp][lane][4].
template <class Tile, DType kDType>
__global__ void __launch_bounds__(kPassThreads)
    bwd_post_kernel(const __grid_constant__ BwdArgs args) {
  // What a warpgroup computed: 64 rows, half of the columns, or (head dim 96) the whole block.
  constexpr bool kSplitRows = Tile::kBlockQ == 128;
  constexpr int kParts = Tile::kHeadDim == 96 ? 1 : 2;
  constexpr int kGroups = (kSplitRows ? Tile::kHeadDim : Tile::kHeadDim / kParts) / 8;
  const BwdParams& params = args.params;
  const FwdParams& p = params.fwd;
  const unsigned number = last_first();
  const int64_t index = number / p.num_heads_q;
  const int head = number % p.num_heads_q;
  const RowBlock block = row_block<Tile>(p, index);
  const SeqInfo& s = block.seq;
  ptx::griddep_wait();
  const float4* sums = reinterpret_cast<const float4*>(
      args.work.dq + (head * args.work.row_blocks + index) * Tile::kBlockQ * Tile::kHeadDim);
  char* const out = static_cast<char*>(params.dq) +
                    2 * (s.q_batch * params.dq_stride.batch + head * params.dq_stride.head);

  // A warp takes 16 rows of four column groups.
  const int lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < kParts * kGroups; i += kPassThreads / 32) {
    const int quad = i % (kGroups / 4), warp = i / (kGroups / 4) % 4, part = i / kGroups;
    const float4* from = sums + (part * kGroups + quad * 4) * 128 + warp * 32 + lane;
    float4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = from[j * 128];
    uint4 rows[2];
    convert_quad<kDType>(rows, v, p.softmax_scale, c);
    const int column = (quad * 4 + c) * 8 + (kSplitRows ? 0 : part * (Tile::kHeadDim / 2));
    if (column >= p.head_dim) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = block.row0 + (kSplitRows ? part * 64 : 0) + warp * 16 + lane / 4 + 8 * r;
      if (row >= s.seqlen_q_slot) continue;
      *reinterpret_cast<uint4*>(out + 2 * ((s.q_row0 + row) * params.dq_stride.row + column)) =
          rows[r];
    }
  }
}

// dK and dV where the query heads of a KV head were dealt out: the sums of their parts, eight
// columns a thread.
template <DType kDType>
__device__ __forceinline__ void sum_parts(const BwdArgs& args, const void* parts, void* out,
                                          const Stride& stride, int head_dim) {
  const FwdParams& p = args.params.fwd;
  if (!out) return;
  const int chunks = head_dim / 8;
  const int64_t rows = p.cu_seqlens_k ? p.cu_seqlens_k[p.batch] : int64_t(p.batch) * p.seqlen_kv;
  const int64_t all = rows * p.num_heads_kv * chunks, stride_i = int64_t(gridDim.x) * kPassThreads;
  for (int64_t i = int64_t(blockIdx.x) * kPassThreads + threadIdx.x; i < all; i += stride_i) {
    const int64_t vector = i / chunks, row = vector / p.num_heads_kv;
    const int chunk = static_cast<int>(i - vector * chunks);
    const uint4* from = static_cast<const uint4*>(parts) + vector * args.splits * chunks + chunk;
    float sum[8] = {};
    for (int s = 0; s < args.splits; ++s) {
      const uint4 v = from[int64_t(s) * chunks];
      const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 pair = ptx::unpack<kDType>(pairs[e]);
        sum[2 * e] += pair.x;
        sum[2 * e + 1] += pair.y;
      }
    }
    const int64_t b = p.cu_seqlens_k ? 0 : row / p.seqlen_kv, head = vector - row * p.num_heads_kv;
    *reinterpret_cast<uint4*>(
        static_cast<char*>(out) + chunk * 16 +
        2 * (b * stride.batch + (row - b * p.seqlen_kv) * stride.row + head * stride.head)) =
        make_uint4(ptx::pack<kDType>(sum[0], sum[1]), ptx::pack<kDType>(sum[2], sum[3]),
                   ptx::pack<kDType>(sum[4], sum[5]), ptx::pack<kDType>(sum[6], sum[7]));
  }
}
template <DType kDType>
__global__ void __launch_bounds__(kPassThreads)
    bwd_parts_kernel(const __grid_constant__ BwdArgs args) {
  const BwdParams& params = args.params;
  ptx::griddep_wait();
  sum_parts<kDType>(args, args.work.dk_parts, params.dk, params.dk_stride, params.fwd.head_dim);
  sum_parts<kDType>(args, args.work.dv_parts, params.dv, params.dv_stride, params.fwd.head_dim_v);
}

// dsink[head] = -sum over rows of exp(sink - lse) * delta. One block a head, a fixed order.
template <class Tile>
__global__ void __launch_bounds__(kPassThreads)
    bwd_sink_kernel(const __grid_constant__ BwdArgs args) {
  __shared__ float partial[kPassThreads];
  const int head = blockIdx.x;
  const float sink2 = args.params.fwd.sink[head] * kLog2e;
  const int64_t rows = args.work.row_blocks * Tile::kBlockQ;
  float sum = 0.0f;
  ptx::griddep_wait();
  for (int64_t r = threadIdx.x; r < rows; r += kPassThreads) {
    sum += exp2f(sink2 - args.work.lse2[head * rows + r]) * args.work.delta[head * rows + r];
  }
  partial[threadIdx.x] = sum;
  for (int n = kPassThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) partial[threadIdx.x] += partial[threadIdx.x + n];
  }
  if (threadIdx.x == 0) args.params.dsink[head] = partial[0];
}

}  // namespace flash_cuda::sm90
