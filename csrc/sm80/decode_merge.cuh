// Puts together the pieces of tiles that several thread blocks share (see decode_work.cuh).
//
// One thread block a row of a tile; its warps take every fourth piece and are added in order.
#pragma once

#include "common/softmax.cuh"
#include "sm80/decode_work.cuh"

namespace flash_cuda::sm80 {

constexpr int kMergeWarps = 4, kMergeThreads = 32 * kMergeWarps;
constexpr int kMergeAhead = 8;  // pieces of a warp that are loaded before their weights are known

// One row of a tile that was cut.
struct MergeRow {
  const DecodeSlots& slots;
  const int share, parts, row, warp, lane;

  __device__ __forceinline__ float lse(int piece) const {
    return slots.lse[int64_t{row} * slots.count + DecodeSlots::slot(share, piece)];
  }
  __device__ __forceinline__ float4 columns(int piece, int col) const {
    const int64_t place = int64_t{DecodeSlots::slot(share, piece)} * slots.block_q + row;
    return *reinterpret_cast<const float4*>(slots.out + place * slots.width + col);
  }
  __device__ __forceinline__ void load_ahead(int col0, int width,
                                             float4 (&ahead)[kMergeAhead]) const {
    const int col = col0 + lane * 4;
#pragma unroll
    for (int k = 0; k < kMergeAhead; ++k) {
      const int piece = warp + k * kMergeWarps;
      ahead[k] =
          piece < parts && col < width ? columns(piece, col) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  // The largest lse (0 if there is none) and the sum of the weights; the same in every lane.
  __device__ __forceinline__ void weigh(float& largest, float& total) const {
    largest = -INFINITY;
    for (int i = lane; i < parts; i += 32) largest = fmaxf(largest, lse(i));
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
    }
    if (largest == -INFINITY) largest = 0.0f;
    total = 0.0f;
    for (int i = lane; i < parts; i += 32) total += ptx::ex2((lse(i) - largest) * kLog2e);
#pragma unroll
    for (int i = 16; i > 0; i /= 2) total += __shfl_xor_sync(0xffffffffu, total, i);
  }
  // Adds up this warp's pieces in four columns of each lane.
  __device__ __forceinline__ float4 sum(int col, float largest,
                                        const float4 (&ahead)[kMergeAhead]) const {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](int piece, const float4& v) {
      const float weight = ptx::ex2((lse(piece) - largest) * kLog2e);
      sum.x = fmaf(weight, v.x, sum.x);
      sum.y = fmaf(weight, v.y, sum.y);
      sum.z = fmaf(weight, v.z, sum.z);
      sum.w = fmaf(weight, v.w, sum.w);
    };
#pragma unroll
    for (int k = 0; k < kMergeAhead; ++k) {
      if (warp + k * kMergeWarps < parts) add(warp + k * kMergeWarps, ahead[k]);
    }
#pragma unroll 4
    for (int i = warp + kMergeAhead * kMergeWarps; i < parts; i += kMergeWarps)
      add(i, columns(i, col));
    return sum;
  }
};

// A block of 128 columns. `out`: of the row's first column.
template <DType kDType>
__device__ __forceinline__ void merge_columns(const MergeRow& r, int col0, int width, float largest,
                                              float inverse, const float4 (&ahead)[kMergeAhead],
                                              float4 (&partial)[kMergeWarps][32], uint16_t* out) {
  const int col = col0 + r.lane * 4;
  if (col < width) partial[r.warp][r.lane] = r.sum(col, largest, ahead);
  __syncthreads();
  if (r.warp == 0 && col < width) {
    float4 sum = partial[0][r.lane];
#pragma unroll
    for (int w = 1; w < kMergeWarps; ++w) {
      const float4 v = partial[w][r.lane];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    *reinterpret_cast<uint2*>(out + col) =
        make_uint2(ptx::pack<kDType>(sum.x * inverse, sum.y * inverse),
                   ptx::pack<kDType>(sum.z * inverse, sum.w * inverse));
  }
  __syncthreads();  // partial may be written again
}

// All that the merge is told: few bytes, since each line of them costs a short kernel time.
struct DecodeMerge {
  DecodeSlots slots;
  void* out;
  float* lse;
  Stride out_stride;
  int64_t lse_batch_stride, lse_head_stride;
  const int* cu_seqlens_q;
  int seqlen_q, head_dim_v, group, heads, tiles, rows, shares_a_tile;

  static DecodeMerge make(const FwdParams& p, const DecodeGrid& g) {
    return {g.slots,           p.out,          p.lse,      p.out_stride,   p.lse_batch_stride,
            p.lse_head_stride, p.cu_seqlens_q, p.seqlen_q, p.head_dim_v,   g.group,
            g.heads,           g.tiles,        g.rows,     g.shares_a_tile};
  }
  // The tile that a share has cut. Where all tiles are cut alike, its number says which.
  __device__ __forceinline__ TileCut cut_of(int share) const {
    if (shares_a_tile == 0) return slots.cuts[share];
    const int number = share / shares_a_tile, place = number / heads, batch = place / tiles;
    return {shares_a_tile, batch, place - batch * tiles, number - place * heads};
  }
};

template <DType kDType>
__global__ void __launch_bounds__(kMergeThreads, 6)
    decode_merge_kernel(const __grid_constant__ DecodeMerge m) {
  __shared__ float4 partial[kMergeWarps][32];
  const int step = blockIdx.x / m.rows, row = blockIdx.x - step * m.rows;
  const int share = step * max(m.shares_a_tile, 1);
  const TileCut cut = m.cut_of(share);
  if (cut.parts == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const MergeRow r{m.slots, share, cut.parts, row, warp, lane};
  float4 ahead[kMergeAhead];  // under way while the weights are found
  r.load_ahead(0, m.head_dim_v, ahead);
  float largest, total;
  r.weigh(largest, total);

  const int packed_row = cut.block * m.slots.block_q + row, q = packed_row / m.group;
  const int head = cut.head * m.group + packed_row - q * m.group;
  const int row0 = m.cu_seqlens_q ? m.cu_seqlens_q[cut.batch] : 0;
  const int rows = m.cu_seqlens_q ? m.cu_seqlens_q[cut.batch + 1] - row0 : m.seqlen_q;
  const int batch = m.cu_seqlens_q ? 0 : cut.batch;
  if (q >= rows) return;
  uint16_t* out = static_cast<uint16_t*>(m.out) + batch * m.out_stride.batch +
                  (row0 + static_cast<int64_t>(q)) * m.out_stride.row + head * m.out_stride.head;
  for (int col0 = 0; col0 < m.head_dim_v; col0 += 128) {
    if (col0 > 0) r.load_ahead(col0, m.head_dim_v, ahead);
    merge_columns<kDType>(r, col0, m.head_dim_v, largest, total > 0.0f ? 1.0f / total : 0.0f, ahead,
                          partial, out);
  }
  if (threadIdx.x == 0) {
    m.lse[batch * m.lse_batch_stride + head * m.lse_head_stride + row0 + q] =
        total > 0.0f ? largest + logf(total) : -INFINITY;
  }
}

}  // namespace flash_cuda::sm80
