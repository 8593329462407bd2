// Split-KV attention of up to 32 rows, without score modifications: the decoding step proper.
//
// The warps of a block share its keys, 16 each of every block of keys, and nothing else: each has a
// ring of stages of its own, loads what it will read, and waits for nobody until the segment ends.
// Every 16 keys are one step of a softmax that is the warp's own; in the end the warps are merged
// in shared memory, in their order. Only exact softmax steps are used, and blocks of keys start at
// the same places for every row, so that a row's result depends on nothing but its keys.
#pragma once

#include "common/kv_view.cuh"
#include "common/softmax.cuh"
#include "sm80/decode_tile.h"
#include "sm80/decode_work.cuh"
#include "sm80/tile_io.cuh"

namespace flash_cuda::sm80 {

template <class Tile, DType kDType>
struct DecodeStream {
  static constexpr int kStepKeys = 16;  // of a warp
  static constexpr int kRowTiles = Tile::kRowTiles, kQuerySteps = Tile::kHeadDim / 16;
  static_assert(Tile::kHeadDim == Tile::kHeadDimV);
  using Smem = SwizzledTile<Tile::kHeadDim>;                // of Q, K and V
  static constexpr int kLanes = 8, kRowStep = 32 / kLanes;  // lanes on a row of a copy
  static_assert(Smem::kGroup == kLanes, "rows 8 apart are permuted alike");
  using Scores = MmaFragment<kStepKeys>;
  using Output = MmaFragment<Tile::kHeadDimV>;
  using Rows = DecodeTileRows<Tile::kBlockQ, Tile::kBlockKV, kDType>;

  // What this lane copies: 16 bytes of each 128, of every fourth row.
  struct LaneSource {
    const char* next;    // in the next step, where rows follow each other
    const char* column;  // of element 0 of the head
  };

  const FwdParams& p;
  const Rows rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t smem_q, smem_ring, smem_merge;
  const typename Rows::Keys keys;
  KvPlaces places;
  LaneSource source_k, source_v;
  const uint32_t lane_to[2];  // where this lane's pieces go in even and odd quarters of a step
  const uint64_t policy;      // of the L2, for K and V
  float scale_log2;

  uint32_t q[Tile::kQueryInRegisters ? kQuerySteps : 1][kRowTiles][4];
  Output o[kRowTiles];
  SoftmaxRows softmax[kRowTiles];

  __device__ __forceinline__ DecodeStream(const FwdParams& params, const DecodeGrid& grid,
                                          const DecodeState& state, uint32_t smem)
      : p(params),
        rows(params, grid, state),
        smem_q(smem),
        smem_ring(smem + Tile::kBytesQ + warp * Tile::kStages * Tile::kBytesStep),
        smem_merge(smem + Tile::kBytesQ),
        keys(rows.keys()),
        places(KvPlaces::make(params, rows.seq, state.segment.batch, rows.kv_head())),
        source_k(lane_source(places.k)),
        source_v(lane_source(places.v)),
        lane_to{Smem::offset(lane / kLanes, lane % kLanes),
                Smem::offset(lane / kLanes + kRowStep, lane % kLanes)},
        policy(ptx::l2_evict_first()),
        scale_log2(params.softmax_scale * kLog2e) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      o[m].clear();
      softmax[m].reset();
    }
  }

  // ---- loads
  __device__ __forceinline__ void load_query() const {
    const char* base = static_cast<const char*>(p.q) +
                       2 * (rows.seq.q_batch * p.q_stride.batch +
                            rows.first_head() * p.q_stride.head + rows.seq.q_row0 * p.q_stride.row);
    load_rows<Tile::kBlockQ, Tile::kHeadDim, Tile::kThreads>(
        smem_q, rows.rows_left(), p.head_dim, p.q,
        [base, first = rows.row0(), group = rows.grid.group, row_bytes = 2 * p.q_stride.row,
         head_bytes = 2 * p.q_stride.head](int i) {
          const int query = (first + i) / group;
          return base + query * row_bytes + (first + i - query * group) * head_bytes;
        });
  }
  // The first key of this warp in block i.
  __device__ __forceinline__ int first_key(int i) const {
    return keys.begin + i * Tile::kBlockKV + warp * kStepKeys;
  }
  __device__ __forceinline__ KvPlace place_of(int i) const {
    return places.find(first_key(i) + lane % kStepKeys, keys.end);
  }
  __device__ __forceinline__ LaneSource lane_source(const KvTensor& t) const {
    const char* column = t.base + lane % kLanes * 16;
    return {column + (first_key(0) + lane / kLanes) * t.row_bytes, column};
  }
  // One tensor's rows of a step.
  __device__ __forceinline__ void load_keys(uint32_t smem, const KvTensor& t, LaneSource& source,
                                            int width, int key, const KvPlace& place) const {
    const int rows_left = keys.end - key - lane / kLanes;  // from this lane's first on
#pragma unroll
    for (int i = 0; i < kStepKeys / kRowStep; ++i) {
      // Rows that do not count may lie anywhere: nothing is read there.
      const char* from = p.block_table
                             ? places.row(source.column, t, place, lane / kLanes + i * kRowStep)
                             : source.next + i * kRowStep * t.row_bytes;
      const uint32_t to = smem + lane_to[i % 2] + i / 2 * (2 * kRowStep * Smem::kRowBytes);
#pragma unroll
      for (int j = 0; j < Smem::kChunks / kLanes; ++j) {
        const bool valid = i * kRowStep < rows_left && (lane % kLanes + j * kLanes) * 8 < width;
        ptx::cp_async_16(to + j * kLanes * 16, from + j * kLanes * 16, valid, policy);
      }
    }
    source.next += Tile::kBlockKV * t.row_bytes;
  }
  __device__ __forceinline__ void load_step(int i, int stage, const KvPlace& place) {
    const uint32_t smem = smem_ring + stage * Tile::kBytesStep;
    load_keys(smem, places.k, source_k, p.head_dim, first_key(i), place);
    load_keys(smem + Tile::kBytesStepK, places.v, source_v, p.head_dim_v, first_key(i), place);
  }

  // ---- one step
  __device__ __forceinline__ void gemm_scores(Scores (&s)[kRowTiles], uint32_t smem_k) const {
    const uint32_t a_base = smem_q + Smem::lane_offset(lane);
    const uint32_t b_base = smem_k + Smem::lane_offset(lane);
    const auto load_b = [&](int k, int n, uint32_t (&b)[4]) {
      load_b_rows_n<Smem>(b, b_base, k, n);
    };
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
        load_b);
  }
  __device__ __forceinline__ void mask_scores(Scores (&s)[kRowTiles], int key) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      apply_mask(s[m], lane, key, [&](int row, int& begin, int& end) {
        const int query = rows.query(m * 16 + row);
        begin = rows.mask.kv_begin(query);
        end = min(rows.mask.kv_end(query), keys.end);
      });
    }
  }
  __device__ __forceinline__ void process(int key, int stage) {
    const uint32_t smem_k = smem_ring + stage * Tile::kBytesStep;
    const uint32_t smem_v = smem_k + Tile::kBytesStepK;
    Scores s[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) s[m].clear();
    gemm_scores(s, smem_k);
    if (key < keys.full_begin || key + kStepKeys > keys.full_end) mask_scores(s, key);
    bool moved = false;
    float rescale[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax[m].step_exact(s[m], scale_log2, rescale[m]);
      moved |= rescale[m][0] != 1.0f || rescale[m][1] != 1.0f;
    }
    if (__any_sync(0xffffffffu, moved)) scale_output(rescale);
    const uint32_t v_base = smem_v + Smem::lane_offset(lane);
    warp_gemm<kDType, kRowTiles, Tile::kHeadDimV, 1>(
        o,
        [&](int k, uint32_t (&a)[kRowTiles][4]) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) accumulators_to_a<kDType>(a[m], s[m], k);
        },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_rows_k<Smem>(b, v_base, k, n); });
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

  __device__ __forceinline__ void main_loop() {
    constexpr int kAhead = Tile::kStages - 1;
    const int blocks = ceil_div(keys.end - keys.begin, Tile::kBlockKV);
    load_query();
    ptx::cp_async_commit();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < blocks) load_step(i, i, place_of(i));
      ptx::cp_async_commit();
    }
    KvPlace next_place = place_of(kAhead);
    ptx::cp_async_wait<kAhead>();
    __syncthreads();  // Q has arrived
    query_to_registers();
    int stage = 0, load_stage = kAhead;
    for (int i = 0; i < blocks; ++i) {
      ptx::cp_async_wait<kAhead - 1>();
      __syncwarp();  // step i has arrived; every lane is done with step i - 1
      if (i + kAhead < blocks) {
        load_step(i + kAhead, load_stage, next_place);
        next_place = place_of(i + kAhead + 1);
      }
      ptx::cp_async_commit();
      process(first_key(i), stage);
      stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
      load_stage = load_stage + 1 == Tile::kStages ? 0 : load_stage + 1;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the rings are free
  }

  // ---- the end: (out, reference, sum) of every warp to shared memory, then row by row.
  static constexpr int kRowFloats = Tile::kMergeRowFloats;
  __device__ __forceinline__ uint32_t state_address(int w, int row) const {
    return smem_merge + Tile::kWarps * Tile::kBlockQ * kRowFloats * 4 +
           (w * Tile::kBlockQ + row) * 8;
  }
  __device__ __forceinline__ uint32_t value_address(int w, int row, int col) const {
    return smem_merge + ((w * Tile::kBlockQ + row) * kRowFloats + col) * 4;
  }
  __device__ __forceinline__ void share_state() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + Output::row(lane, r);
        const float sum = quad_sum(softmax[m].sum[r]);
        if (lane % 4 == 0)
          ptx::store_shared_f32x2(state_address(warp, row), softmax[m].ref[r], sum);
#pragma unroll
        for (int t = 0; t < Output::kTiles; ++t) {
          ptx::store_shared_f32x2(value_address(warp, row, Output::col(lane, 2 * t)),
                                  o[m].acc[t][2 * r], o[m].acc[t][2 * r + 1]);
        }
      }
    }
  }
  __device__ __forceinline__ void merge_and_store() const {
    constexpr int kLanes = Tile::kThreads / Tile::kBlockQ;  // threads on one row
    const int row = threadIdx.x / kLanes, first_col = threadIdx.x % kLanes * 4;
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
    if (first_col == 0) {
      rows.store_lse(row, ref == -INFINITY ? -INFINITY : ref * kLn2 + logf(sum));
    }
    if (!rows.wants_out(keys.begin < keys.end)) return;
    const typename Rows::RowPlace place = rows.place_of(row);
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
      Rows::store_out(place, col, value);
    }
  }
  __device__ __forceinline__ void run() {
    if (keys.begin < keys.end) main_loop();
    share_state();
    __syncthreads();  // every warp has stored
    merge_and_store();
    __syncthreads();  // shared memory may be written again
  }
};

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    decode_stream_kernel(const __grid_constant__ FwdParams p,
                         const __grid_constant__ DecodeGrid grid) {
  extern __shared__ __align__(128) char smem[];
  __shared__ DecodeState state;
  const DecodeWalk<Tile::kBlockQ, Tile::kBlockKV, Tile::kThreads> walk{p, grid, state};
  walk.start();
  while (walk.next()) DecodeStream<Tile, kDType>(p, grid, state, ptx::smem_addr(smem)).run();
}

}  // namespace flash_cuda::sm80
