// Split-KV attention: few query rows, long KV (decoding, speculative decoding, short chunks), with
// every feature. decode_stream.cuh is the faster kernel for what it can do.
//
// A thread block works on segments: keys of one tile of rows; a row is a query of one head, or,
// packed, of every query head of a KV head, so that K and V are read once for the group. The kernel
// lives from memory bandwidth: K and V run through a ring of stages. Where 16 rows are all there
// is, the warps of a block share its keys, each with a softmax of its own, and are merged in the
// end. Only exact softmax steps are used, and blocks of keys start at the same places for every
// row, so that a row's result depends on nothing but its own keys.
#pragma once

#include "common/dropout.cuh"
#include "common/kv_view.cuh"
#include "common/score_mod.cuh"
#include "common/softmax.cuh"
#include "sm80/decode_merge.cuh"
#include "sm80/decode_tile.h"
#include "sm80/decode_work.cuh"
#include "sm80/tile_io.cuh"

namespace flash_cuda::sm80 {

template <class Tile, DType kDType, Variant kVariant>
struct DecodeBlock {
  static constexpr bool kGeneral = kVariant == Variant::kGeneral;
  static constexpr int kStages = Tile::kStages - (kGeneral ? 1 : 0);  // qv takes one
  using SmemK = SwizzledTile<Tile::kHeadDim>;                         // also Q
  using SmemV = SwizzledTile<Tile::kHeadDimV>;                        // also qv
  using Scores = MmaFragment<Tile::kKeys>;
  using Output = MmaFragment<Tile::kHeadDimV>;

  using Rows = DecodeTileRows<Tile::kBlockQ, Tile::kBlockKV, kDType>;
  using Keys = typename Rows::Keys;

  const FwdParams& p;
  const Rows tile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_warp = warp % Tile::kRowWarps, key_warp = warp / Tile::kRowWarps;
  const uint32_t smem_q, smem_stage, smem_qv;
  KvView<true> k_view, v_view;
  float scale_log2;
  int row_q[2];  // queries of this lane's rows
  ScoreMod score_mod[2];
  Dropout dropout[2];

  Output o[1];
  SoftmaxRows rows;

  __device__ DecodeBlock(const FwdParams& params, const DecodeGrid& grid, const DecodeState& state,
                         uint32_t smem)
      : p(params),
        tile(params, grid, state),
        smem_q(smem),
        smem_stage(smem + Tile::kBytesQ),
        smem_qv(smem_stage + kStages * Tile::kBytesStage) {
    k_view =
        KvView<true>::make(p, p.k, p.k_stride, tile.seq, tile.segment.batch, tile.kv_head(), 2);
    v_view =
        KvView<true>::make(p, p.v, p.v_stride, tile.seq, tile.segment.batch, tile.kv_head(), 2);
    scale_log2 = kGeneral ? kLog2e : p.softmax_scale * kLog2e;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_q[r] = tile.query(tile_row(r));
      if constexpr (kGeneral) {
        const int head = tile.head(tile_row(r));
        score_mod[r] =
            ScoreMod::make(p, tile.segment.batch, head, tile.seq.seqlen_q, tile.seq.seqlen_kv);
        if (p.dropout_p > 0.0f) dropout[r] = Dropout::make(p, tile.segment.batch, head);
      }
    }
    o[0].clear();
    rows.reset();
  }
  __device__ int tile_row(int r) const { return row_warp * 16 + Output::row(lane, r); }

  // ---- loads. Addresses are captured by value: see fwd_kernel.cuh.
  template <int kRows, int kWidth, class RowAddress>
  __device__ void load(uint32_t smem, int rows_valid, int width, const void* tensor,
                       RowAddress row_address) {
    if constexpr (kGeneral) {
      if (p.unaligned) {
        load_rows_unaligned<kRows, kWidth, Tile::kThreads>(smem, rows_valid, width, row_address);
        return;
      }
    }
    load_rows<kRows, kWidth, Tile::kThreads>(smem, rows_valid, width, tensor, row_address);
  }
  // Rows of q or qv: `group` heads for each query.
  template <int kWidth>
  __device__ void load_query(uint32_t smem, const void* tensor, const Stride& stride, int width) {
    const char* base = static_cast<const char*>(tensor) +
                       2 * (tile.seq.q_batch * stride.batch + tile.first_head() * stride.head +
                            tile.seq.q_row0 * stride.row);
    load<Tile::kBlockQ, kWidth>(smem, tile.rows_left(), width, tensor,
                                [base, first = tile.row0(), heads = tile.grid.group,
                                 row_bytes = 2 * stride.row, head_bytes = 2 * stride.head](int i) {
                                  const int q = (first + i) / heads;
                                  return base + q * row_bytes +
                                         (first + i - q * heads) * head_bytes;
                                });
  }
  __device__ void load_kv(int kv0, int end, int stage) {
    const uint32_t smem = smem_stage + stage * Tile::kBytesStage;
    load<Tile::kBlockKV, Tile::kHeadDim>(
        smem, end - kv0, p.head_dim, p.k,
        [view = k_view, kv0](int row) { return view.row(kv0 + row); });
    load<Tile::kBlockKV, Tile::kHeadDimV>(
        smem + Tile::kBytesK, end - kv0, p.head_dim_v, p.v,
        [view = v_view, kv0](int row) { return view.row(kv0 + row); });
  }

  // ---- one block of keys
  template <class Smem, int kSteps>
  __device__ void gemm_scores(Scores (&s)[1], uint32_t queries, uint32_t keys) {
    const uint32_t a_base = queries + Smem::lane_offset(lane) + row_warp * 16 * Smem::kRowBytes;
    const uint32_t b_base =
        keys + Smem::lane_offset(lane) + key_warp * Tile::kKeys * Smem::kRowBytes;
    warp_gemm<kDType, 1, Tile::kKeys, kSteps>(
        s, [&](int k, uint32_t (&a)[1][4]) { load_a_rows_m<Smem>(a[0], a_base, 0, k); },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_rows_n<Smem>(b, b_base, k, n); });
  }
  __device__ void gemm_pv(const Scores& s, uint32_t values) {
    const uint32_t v_base =
        values + SmemV::lane_offset(lane) + key_warp * Tile::kKeys * SmemV::kRowBytes;
    warp_gemm<kDType, 1, Tile::kHeadDimV, Tile::kKeys / 16>(
        o, [&](int k, uint32_t (&a)[1][4]) { accumulators_to_a<kDType>(a[0], s, k); },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_rows_k<SmemV>(b, v_base, k, n); });
  }
  __device__ void modify_scores(Scores& s, int first_key) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        const int kv = first_key + Scores::col(lane, c);
        s.at(r, c) = score_mod[r].capped(s.at(r, c)) + score_mod[r].added(row_q[r], kv);
      }
    }
  }
  __device__ void drop_scores(Scores& s, int first_key) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        const int kv = first_key + Scores::col(lane, c);
        if (!dropout[r].keep(row_q[r], kv)) s.at(r, c) = 0.0f;
      }
    }
  }
  __device__ void process(int kv0, const Keys& part, int stage) {
    const uint32_t keys = smem_stage + stage * Tile::kBytesStage, values = keys + Tile::kBytesK;
    const int first_key = kv0 + key_warp * Tile::kKeys;
    Scores s[1];
    s[0].clear();
    gemm_scores<SmemK, Tile::kHeadDim / 16>(s, smem_q, keys);
    if constexpr (kGeneral) {
      if (p.qv) gemm_scores<SmemV, Tile::kHeadDimV / 16>(s, smem_qv, values);
      modify_scores(s[0], first_key);
    }
    if (kv0 < part.full_begin || kv0 + Tile::kBlockKV > part.full_end) {
      apply_mask(s[0], lane, first_key, [&](int row, int& begin, int& end) {
        const int q = row_q[row >= 8 ? 1 : 0];
        begin = tile.mask.kv_begin(q);
        end = min(tile.mask.kv_end(q), part.end);
      });
    }
    float rescale[2];
    rows.step_exact(s[0], scale_log2, rescale);
    scale_output(rescale);
    if constexpr (kGeneral) {
      if (p.dropout_p > 0.0f) drop_scores(s[0], first_key);
    }
    gemm_pv(s[0], values);
  }
  __device__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < Output::kCols; ++c) o[0].at(r, c) *= factor[r];
    }
  }

  __device__ void main_loop(const Keys& part) {
    const int blocks = ceil_div(part.end - part.begin, Tile::kBlockKV);
    load_query<Tile::kHeadDim>(smem_q, p.q, p.q_stride, p.head_dim);
    if constexpr (kGeneral) {
      if (p.qv) load_query<Tile::kHeadDimV>(smem_qv, p.qv, p.qv_stride, p.head_dim_v);
    }
    constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < blocks) load_kv(part.begin + i * Tile::kBlockKV, part.end, i);
      ptx::cp_async_commit();
    }
    for (int i = 0; i < blocks; ++i) {
      ptx::cp_async_wait<kAhead - 1>();
      __syncthreads();  // block i has arrived; every warp is done with block i -
                        // 1
      const auto load_next = [&] {
        const int next = i + kAhead;
        if (next < blocks) {
          load_kv(part.begin + next * Tile::kBlockKV, part.end, next % kStages);
        }
        ptx::cp_async_commit();
      };
      if constexpr (kStages > 1) load_next();
      process(part.begin + i * Tile::kBlockKV, part, i % kStages);
      if constexpr (kStages == 1) {
        __syncthreads();  // every warp is done with the only stage
        load_next();
      }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the stages are free
  }

  // ---- epilogue Normalises o by the sums of all key warps.
  __device__ void finish() {
    float own_ref[2] = {rows.ref[0], rows.ref[1]};
    if constexpr (Tile::kKeyWarps > 1) merge_rows();
    float inverse[2], lse[2], extra = -INFINITY;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kGeneral) {
        // The sink joins one segment only.
        if (p.sink && tile.segment.first)
          extra = p.sink[min(tile.head(tile_row(r)), p.num_heads_q - 1)];
      }
      float inverse_r[2], lse_r[2];
      rows.finalize(inverse_r, lse_r, extra);
      inverse[r] = inverse_r[r];
      lse[r] = lse_r[r];
      factor[r] = own_ref[r] == -INFINITY ? 0.0f : inverse[r] * ptx::ex2(own_ref[r] - rows.ref[r]);
      if constexpr (kGeneral) {
        if (p.dropout_p > 0.0f) factor[r] *= dropout[r].keep_scale;
      }
    }
    scale_output(factor);
    if (key_warp == 0) store_lse(lse);
  }
  // The state of a row over the keys of all warps, the same bits in every one of them.
  __device__ void merge_rows() {
    const uint32_t smem = smem_stage + Tile::kKeyWarps * Tile::kBlockQ * Tile::kHeadDimV * 4;
    const float sums[2] = {quad_sum(rows.sum[0]), quad_sum(rows.sum[1])};
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t at = smem + (key_warp * 16 + Output::row(lane, r)) * 8;
        ptx::store_shared_4(at, __float_as_uint(rows.ref[r]));
        ptx::store_shared_4(at + 4, __float_as_uint(sums[r]));
      }
    }
    __syncthreads();  // every warp has stored
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2 state[Tile::kKeyWarps];  // ref, sum
      float ref = -INFINITY, sum = 0.0f;
#pragma unroll
      for (int w = 0; w < Tile::kKeyWarps; ++w) {
        state[w] = ptx::load_shared_f32x2(smem + (w * 16 + Output::row(lane, r)) * 8);
        ref = fmaxf(ref, state[w].x);
      }
#pragma unroll
      for (int w = 0; w < Tile::kKeyWarps; ++w) {
        if (state[w].x != -INFINITY) sum = fmaf(state[w].y, ptx::ex2(state[w].x - ref), sum);
      }
      rows.ref[r] = ref;
      rows.sum[r] = lane % 4 == 0 ? sum : 0.0f;  // finalize adds up the quad
    }
  }
  __device__ void store_lse(const float (&lse)[2]) const {
    if (lane % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) tile.store_lse(tile_row(r), lse[r]);
  }
  __device__ void store_out() const {
    if constexpr (Tile::kKeyWarps == 1) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const typename Rows::RowPlace place = tile.place_of(tile_row(r));
#pragma unroll
        for (int t = 0; t < Output::kTiles; ++t) {
          const float pair[2] = {o[0].acc[t][2 * r], o[0].acc[t][2 * r + 1]};
          Rows::store_out(place, Output::col(lane, 2 * t), pair);
        }
      }
    } else {
      store_merged();
    }
  }
  // Adds up the key warps through shared memory, in their order.
  __device__ void store_merged() const {
    constexpr int kRowFloats = Tile::kHeadDimV;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = key_warp * 16 + Output::row(lane, r);
#pragma unroll
      for (int t = 0; t < Output::kTiles; ++t) {
        const uint32_t at = smem_stage + (row * kRowFloats + Output::col(lane, 2 * t)) * 4;
        ptx::store_shared_4(at, __float_as_uint(o[0].acc[t][2 * r]));
        ptx::store_shared_4(at + 4, __float_as_uint(o[0].acc[t][2 * r + 1]));
      }
    }
    __syncthreads();  // every warp has stored
    constexpr int kVectors = kRowFloats / 4;
    for (int i = threadIdx.x; i < 16 * kVectors; i += Tile::kThreads) {
      const int row = i / kVectors, col = i % kVectors * 4;
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < Tile::kKeyWarps; ++w) {
        uint32_t v[4];
        ptx::load_shared_16(v, smem_stage + ((w * 16 + row) * kRowFloats + col) * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += __uint_as_float(v[j]);
      }
      Rows::store_out(tile.place_of(row), col, sum);
    }
  }
  __device__ void run() {
    const Keys part = tile.keys();
    const bool has_keys = part.begin < part.end;
    if (has_keys) main_loop(part);
    finish();
    if (tile.wants_out(has_keys)) store_out();
  }
};

template <class Tile, DType kDType, Variant kVariant>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    decode_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ DecodeGrid grid) {
  extern __shared__ __align__(128) char smem[];
  __shared__ DecodeState state;
  const DecodeWalk<Tile::kBlockQ, Tile::kBlockKV, Tile::kThreads> walk{p, grid, state};
  walk.start();
  while (walk.next()) {
    DecodeBlock<Tile, kDType, kVariant> block(p, grid, state, ptx::smem_addr(smem));
    block.run();
    merge_if_last<Tile::kThreads>(block.tile, state);
    __syncthreads();  // shared memory may be written again
  }
}

}  // namespace flash_cuda::sm80
