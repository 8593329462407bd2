// What the warps of a split-KV kernel of up to 32 rows do between them, whatever they work on.
//
// The warps of a block share its keys, 16 each of every block of keys, and nothing else: each has a
// ring of stages of its own, loads what it will read, and waits for nobody until the run of keys
// ends. Every 16 keys are one step of a softmax that is the warp's own; in the end the warps are
// merged in shared memory, in their order. Only exact softmax steps are used.
#pragma once

#include "common/softmax.cuh"
#include "sm80/decode_ring.cuh"
#include "sm80/decode_tile.h"
#include "sm80/tile_io.cuh"

namespace flash_cuda::sm80 {

template <class Tile, DType kDType>
struct DecodeWarps {
  static constexpr int kStepKeys = 16;  // of a warp
  static constexpr int kRowTiles = Tile::kRowTiles, kQuerySteps = Tile::kHeadDim / 16;
  static_assert(Tile::kHeadDim == Tile::kHeadDimV);
  using Smem = SwizzledTile<Tile::kHeadDim>;  // of Q, K and V
  using Scores = MmaFragment<kStepKeys>;
  using Output = MmaFragment<Tile::kHeadDimV>;

  // What a thread copies of Q: 16 bytes of each of these rows.
  static constexpr int kQueryRowStep = Tile::kThreads / Smem::kChunks;
  static constexpr int kQueryPieces = (Tile::kBlockQ + kQueryRowStep - 1) / kQueryRowStep;
  using QueryPieces = uint4[kQueryPieces];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t smem_q, smem_merge;
  const float scale_log2;
  uint32_t q[Tile::kQueryInRegisters ? kQuerySteps : 1][kRowTiles][4];
  Output o[kRowTiles];
  SoftmaxRows softmax[kRowTiles];

  __device__ __forceinline__ DecodeWarps(uint32_t smem, float softmax_scale)
      : smem_q(smem), smem_merge(smem + Tile::kBytesQ), scale_log2(softmax_scale * kLog2e) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      o[m].clear();
      softmax[m].reset();
    }
  }

  // Rows [0, count) of q; address(row) says where they lie. Other rows, and columns from `width`
  // on, become zero. By plain loads, which need not wait for the copies of K and V.
  template <class Address>
  __device__ __forceinline__ void load_query(int count, int width, QueryPieces& pieces,
                                             Address address) const {
#pragma unroll
    for (int i = 0; i < kQueryPieces; ++i) {
      const int row = threadIdx.x / Smem::kChunks + i * kQueryRowStep;
      const int chunk = threadIdx.x % Smem::kChunks;
      pieces[i] = make_uint4(0, 0, 0, 0);
      if (row < count && chunk * 8 < width) {
        pieces[i] = *reinterpret_cast<const uint4*>(address(row) + chunk * 16);
      }
    }
  }
  __device__ __forceinline__ void store_query(const QueryPieces& pieces) const {
#pragma unroll
    for (int i = 0; i < kQueryPieces; ++i) {
      const int row = threadIdx.x / Smem::kChunks + i * kQueryRowStep;
      if (kQueryRowStep > Tile::kBlockQ && row >= Tile::kBlockQ) return;
      const uint32_t words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
      ptx::store_shared_16(smem_q + Smem::offset(row, threadIdx.x % Smem::kChunks), words);
    }
  }
  __device__ __forceinline__ void query_to_registers() {
    if constexpr (Tile::kQueryInRegisters) {
      const uint32_t base = smem_q + Smem::lane_offset(lane);
#pragma unroll
      for (int k = 0; k < kQuerySteps; ++k) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) load_a_rows_m<Smem>(q[k][m], base, m, k);
      }
    }
  }

  // ---- one step
  __device__ __forceinline__ void gemm_scores(Scores (&s)[kRowTiles], uint32_t smem_k) const {
    const uint32_t a_base = smem_q + Smem::lane_offset(lane);
    const uint32_t b_base = smem_k + Smem::lane_offset_crossed(lane);
    warp_gemm<kDType, kRowTiles, kStepKeys, kQuerySteps>(
        s,
        [&](int k, uint32_t (&a)[kRowTiles][4]) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            if constexpr (Tile::kQueryInRegisters) {
#pragma unroll
              for (int i = 0; i < 4; ++i) a[m][i] = q[k][m][i];
            } else {
              load_a_rows_m<Smem>(a[m], a_base, m, k);
            }
          }
        },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_crossed<Smem>(b, b_base, k, n); });
  }
  __device__ __forceinline__ void scale_output(const float (&factor)[kRowTiles][2]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < Output::kCols; ++c) o[m].at(r, c) *= factor[m][r];
      }
    }
  }
  // mask(scores) hides the keys that do not count.
  template <class Mask>
  __device__ __forceinline__ void process(uint32_t smem_k, Mask mask) {
    Scores s[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) s[m].clear();
    gemm_scores(s, smem_k);
    mask(s);
    bool moved = false;
    float rescale[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax[m].step_exact(s[m], scale_log2, rescale[m]);
      moved |= rescale[m][0] != 1.0f || rescale[m][1] != 1.0f;
    }
    if (__any_sync(0xffffffffu, moved)) scale_output(rescale);
    const uint32_t v_base = smem_k + Tile::kBytesStepK + Smem::lane_offset(lane);
    warp_gemm<kDType, kRowTiles, Tile::kHeadDimV, 1>(
        o,
        [&](int k, uint32_t (&a)[kRowTiles][4]) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) accumulators_to_a<kDType>(a[m], s[m], k);
        },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_rows_k<Smem>(b, v_base, k, n); });
  }

  // All steps of a run of keys, for which `ring` has been started. One loop fills the ring and
  // works it off, so that there is one copy of the code that loads: a short call takes as long as
  // its instructions take to arrive. load_rows_of_q(pieces) starts plain loads, mask(i, scores) is
  // for step i.
  template <class Ring, class LoadQuery, class Mask>
  __device__ __forceinline__ void main_loop(Ring& ring, int steps, LoadQuery load_rows_of_q,
                                            Mask mask) {
    constexpr int kAhead = Tile::kStages - 1;
    int stage = 0, load_stage = 0;
    QueryPieces pieces;  // on their way beside the first steps
#pragma unroll 1
    for (int i = -kAhead; i < steps; ++i) {
      if (i >= 0) {
        ring.template wait<kAhead - 1>();
        __syncwarp();  // step i has arrived; every lane is done with step i - 1
      }
      if (i + kAhead < steps) ring.load(load_stage);
      ring.commit();
      load_stage = load_stage + 1 == Tile::kStages ? 0 : load_stage + 1;
      if (i == -kAhead) load_rows_of_q(pieces);
      if (i == -1) {
        store_query(pieces);
        __syncthreads();  // Q has arrived
        query_to_registers();
      }
      if (i < 0) continue;
      process(ring.stage(stage), [&](Scores(&s)[kRowTiles]) { mask(i, s); });
      stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    }
    ring.wait_all();
    __syncthreads();  // the rings are free
  }

  // ---- the end: (out, reference, sum) of every warp to shared memory, then row by row.
  __device__ __forceinline__ uint32_t state_address(int w, int row) const {
    return smem_merge + Tile::kWarps * Tile::kBlockQ * Tile::kMergeRowFloats * 4 +
           (w * Tile::kBlockQ + row) * 8;
  }
  __device__ __forceinline__ uint32_t value_address(int w, int row, int col) const {
    return smem_merge + ((w * Tile::kBlockQ + row) * Tile::kMergeRowFloats + col) * 4;
  }
  __device__ __forceinline__ void share_state() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + Output::row(lane, r);
        const float sum = quad_sum(softmax[m].sum[r]);
        if (lane % 4 == 0) {
          ptx::store_shared_f32x2(state_address(warp, row), softmax[m].ref[r], sum);
        }
#pragma unroll
        for (int t = 0; t < Output::kTiles; ++t) {
          ptx::store_shared_f32x2(value_address(warp, row, Output::col(lane, 2 * t)),
                                  o[m].acc[t][2 * r], o[m].acc[t][2 * r + 1]);
        }
      }
    }
  }
  // Merges the warps' states for the rows [0, count): store_lse(row, lse) by one thread,
  // store_out(place_of(row), col, four values) by several.
  template <class StoreLse, class PlaceOf, class StoreOut>
  __device__ __forceinline__ void merge_warps(int count, StoreLse store_lse, PlaceOf place_of,
                                              StoreOut store_out) {
    constexpr int kLanes = Tile::kThreads / Tile::kBlockQ;  // threads on one row
    const int row = threadIdx.x / kLanes, first_col = threadIdx.x % kLanes * 4;
    share_state();
    __syncthreads();  // every warp has stored
    if (row >= count) return;
    float2 state[Tile::kWarps];  // reference, sum
    float ref = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) {
      state[w] = ptx::load_shared_f32x2(state_address(w, row));
      ref = fmaxf(ref, state[w].x);
    }
    float factor[Tile::kWarps];
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) {
      factor[w] = state[w].x == -INFINITY ? 0.0f : ptx::ex2(state[w].x - ref);
      sum = fmaf(state[w].y, factor[w], sum);
    }
    const float inverse = sum > 0.0f ? 1.0f / sum : (sum == sum ? 0.0f : sum);
    if (first_col == 0) store_lse(row, ref == -INFINITY ? -INFINITY : ref * kLn2 + logf(sum));
    const auto place = place_of(row);
#pragma unroll
    for (int col = first_col; col < Tile::kHeadDimV; col += kLanes * 4) {
      float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < Tile::kWarps; ++w) {
        uint32_t v[4];
        ptx::load_shared_16(v, value_address(w, row, col));
#pragma unroll
        for (int j = 0; j < 4; ++j) value[j] = fmaf(__uint_as_float(v[j]), factor[w], value[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] *= inverse;
      store_out(place, col, value);
    }
  }
};

}  // namespace flash_cuda::sm80
