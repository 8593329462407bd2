// Puts together the pieces of a tile that several thread blocks share: in the thread block that is
// the last to finish one, from the first piece to the last, so that the bits do not depend on which
// it is.
#pragma once

#include "common/softmax.cuh"
#include "ptx/red.h"
#include "sm80/decode_work.cuh"

namespace flash_cuda::sm80 {

// Pieces of tiles that have arrived, a counter for each share that has begun one that it left to
// others. Zero between launches; LaunchSlots says which launch has which.
constexpr int kMostShares = 512, kStreamArrivals = 256, kArrivals = 1024;
static __device__ int arrivals[kArrivals][kMostShares];

// All pieces have arrived with the one that the threads of this thread block have stored. `arrived`
// counts them and is left at zero. Called by all threads.
__device__ __forceinline__ bool is_last_piece(int* arrived, int parts, bool& shared_answer) {
  __syncthreads();  // all threads have stored
  if (threadIdx.x == 0) {
    const bool last = ptx::add_acq_rel(arrived, 1) == parts - 1;
    if (last) *arrived = 0;
    shared_answer = last;
  }
  __syncthreads();
  return shared_answer;
}

// One row of a tile, by a warp. `Pieces` has parts, lse(row, piece) and width, and from
// first_column(row) on the floats of the row's pieces, `stride` apart, but the first of them
// `extra` further on.
template <class Pieces>
struct DecodeMerge {
  static constexpr int kAtOnce = 16;  // pieces that a lane has under way

  const Pieces& pieces;
  const int row;
  const int lane = threadIdx.x % 32;
  float first_lse, largest, total;  // of this lane's first piece, of all

  __device__ __forceinline__ DecodeMerge(const Pieces& p, int r) : pieces(p), row(r) {}

  __device__ __forceinline__ float lse(int piece) const {
    return piece < pieces.parts ? pieces.lse(row, piece) : -INFINITY;
  }
  __device__ __forceinline__ void weigh() {
    first_lse = lse(lane);
    largest = first_lse;
    for (int i = lane + 32; i < pieces.parts; i += 32) largest = fmaxf(largest, lse(i));
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
    }
    if (largest == -INFINITY) largest = 0.0f;
    total = ptx::ex2((first_lse - largest) * kLog2e);
    for (int i = lane + 32; i < pieces.parts; i += 32) {
      total += ptx::ex2((lse(i) - largest) * kLog2e);
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) total += __shfl_xor_sync(0xffffffffu, total, i);
  }
  // The row's lse.
  __device__ __forceinline__ float merged_lse() const {
    return total == 0.0f ? -INFINITY : largest + logf(total);
  }
  __device__ __forceinline__ void load(int first, int col, float4 (&v)[kAtOnce]) const {
    const float* from = pieces.first_column(row) + col + int64_t{first} * pieces.stride;
    const int count = col < pieces.width ? pieces.parts - first : 0;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float* at = from + (first + k == 0 ? pieces.extra : k * pieces.stride);
      v[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (k < count) v[k] = __ldcg(reinterpret_cast<const float4*>(at));
    }
  }
  // Four columns of the row; `v` has been loaded from the first pieces.
  __device__ __forceinline__ void add_up(int col, float4 (&v)[kAtOnce], float (&sum)[4]) const {
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
    float at = first_lse;
#pragma unroll 1
    for (int first = 0; first < pieces.parts; first += kAtOnce) {
      if (first > 0) {
        load(first, col, v);
        at = lse(first + lane);
      }
      const float weight = ptx::ex2((at - largest) * kLog2e);  // lane i: of piece first + i
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const float w = __shfl_sync(0xffffffffu, weight, k);
        sum[0] = fmaf(w, v[k].x, sum[0]);
        sum[1] = fmaf(w, v[k].y, sum[1]);
        sum[2] = fmaf(w, v[k].z, sum[2]);
        sum[3] = fmaf(w, v[k].w, sum[3]);
      }
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] *= inverse;
  }
  // store_lse(lse) by one lane, store(col, four values) by all.
  template <class StoreLse, class Store>
  __device__ __forceinline__ void run(StoreLse store_lse, Store store) {
    float4 v[kAtOnce];
    load(0, lane * 4, v);  // under way while the weights are found
    weigh();
    if (lane == 0) store_lse(merged_lse());
#pragma unroll 1
    for (int col = lane * 4; col - lane * 4 < pieces.width; col += 128) {
      if (col >= 128) load(0, col, v);
      float sum[4];
      add_up(col, v, sum);
      store(col, sum);
    }
  }
};

// The pieces of a segment's tile in the slots of the workspace.
struct SlotPieces {
  const DecodeSlots& slots;
  const int first_share, parts, width, stride, extra;

  __device__ __forceinline__ SlotPieces(const DecodeSlots& s, int share, int count)
      : slots(s),
        first_share(share),
        parts(count),
        width(s.width),
        stride(2 * s.block_q * s.width),
        extra(s.block_q * s.width) {}

  __device__ __forceinline__ float lse(int row, int piece) const {
    return __ldcg(slots.lse + int64_t{row} * slots.count + DecodeSlots::slot(first_share, piece));
  }
  __device__ __forceinline__ const float* first_column(int row) const {
    return slots.out + (int64_t{2 * first_share} * slots.block_q + row) * width;
  }
};

// Called by all threads of a thread block when they have stored a segment; `rows` is its
// DecodeTileRows.
template <int kThreads, class Rows>
__device__ __forceinline__ void merge_if_last(const Rows& rows, DecodeState& state) {
  using Target = DecodeSegment::Target;
  if (rows.segment.target != Target::kSlot) return;
  const SlotPieces pieces(rows.grid.slots, rows.segment.first_share, rows.segment.parts);
  int* arrived = &arrivals[rows.grid.counters][pieces.first_share];
  if (!is_last_piece(arrived, pieces.parts, state.merges)) return;
  if (threadIdx.x == 0) state.segment.target = Target::kOut;
  __syncthreads();
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < rows.grid.rows; row += kThreads / 32) {
    const typename Rows::RowPlace place = rows.place_of(row);
    DecodeMerge<SlotPieces>(pieces, row)
        .run([&](float lse) { rows.store_lse(row, lse); },
             [&](int col, const float (&v)[4]) { Rows::store_out(place, col, v); });
  }
}

}  // namespace flash_cuda::sm80
