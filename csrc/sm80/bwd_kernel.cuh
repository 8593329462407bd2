// Backward attention with mma.sync and cp.async (Ampere and later).
//
// One thread block owns kBlockKV keys of one KV head and walks the query tiles that see them, of
// all query heads of the group, so that dK and dV stay in registers and need no reduction. Scores
// are computed transposed (a warp holds a few tiles of 16 keys x kWidthS queries): P^T and dS^T
// then are the left operands of dV += P^T dO and dK += dS^T Q as they stand, and only dS goes
// through shared memory, for dQ = dS K, which is added to an fp32 workspace. Query tiles are
// visited from last to first. In deterministic mode a thread block walks several KV blocks and adds
// to a copy of dq that is its own.
#pragma once

#include "common/bwd_workspace.h"
#include "common/dropout.cuh"
#include "common/kv_view.cuh"
#include "common/mask.h"
#include "common/scheduler.cuh"
#include "common/score_mod.cuh"
#include "common/softmax.cuh"
#include "ptx/global.h"
#include "ptx/red.h"
#include "sm80/bwd_tile.h"
#include "sm80/tile_io.cuh"

namespace flash_cuda::sm80 {

// kTurns: dq may be added to in turn (ws.turn). Tiles that have copies of dq do without elsewhere.
template <class Tile, DType kDType, bool kTurns, Variant kVariant>
struct BwdBlock {
  static constexpr bool kGeneral = kVariant == Variant::kGeneral;
  static constexpr bool kShared = Tile::kSplitD > 1;  // P and dS operands from shared memory
  using SmemK = SwizzledTile<Tile::kHeadDim>;         // also Q
  using SmemV = SwizzledTile<Tile::kHeadDimV>;        // also dO
  using SmemS = SwizzledTile<Tile::kBlockQ>;          // rows are keys
  using Scores = MmaFragment<Tile::kWidthS>;
  static constexpr bool kCopies = has_dq_copies(Tile::kBlockKV);  // of dq, in deterministic mode
  static constexpr int kStepsQ = Tile::kBlockQ / 16;
  static constexpr int kKeyTiles = Tile::kKeyTiles, kKeyWarps = Tile::kKeyWarps;
  using Operand = uint32_t[kKeyTiles][Scores::kTiles / 2][4];  // scores as left operands

  const BwdParams& p;
  const FwdParams& f;
  const BwdWorkspace& ws;
  const SeqInfo seq;
  const Mask mask;
  const int batch, kv_head, group, kv0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_warp = warp % kKeyWarps, part = warp / kKeyWarps;
  const uint32_t smem_k, smem_v, smem_stage, smem_ds, smem_p;
  BlockRange range;
  int tile_base;      // of this sequence in the workspace
  bool ragged;        // this block reaches past the last key
  bool needs_ds;      // somebody wants more than dV
  int head, q_block;  // of the iteration
  int turns_seen;     // of this tile of dq, thread 0
  ScoreMod score_mod;
  Dropout dropout;

  MmaFragment<Tile::kWidthDk> dk[kKeyTiles];
  MmaFragment<Tile::kWidthDv> dv[kKeyTiles];

  // `previous`: the KV block that this thread block had before, or -1.
  __device__ BwdBlock(const BwdParams& params, const BwdWorkspace& workspace, const WorkTile& work,
                      int previous, uint32_t smem)
      : p(params),
        f(params.fwd),
        ws(workspace),
        seq(seq_info_or_tail(params.fwd, work.batch)),
        mask(Mask::make(params.fwd, seq.seqlen_q, seq.seqlen_kv)),
        batch(work.batch),
        kv_head(work.head),
        group(params.fwd.num_heads_q / params.fwd.num_heads_kv),
        kv0(work.block * Tile::kBlockKV),
        smem_k(smem),
        smem_v(smem_k + Tile::kBytesK),
        smem_stage(smem_v + Tile::kBytesV),
        smem_ds(smem_stage + Tile::kStages * Tile::kBytesStage),
        smem_p(smem_ds + Tile::kBytesScores) {
    range = mask.q_blocks(kv0, Tile::kBlockKV, Tile::kBlockQ);
    tile_base = ws.tile_base(f, seq.q_row0, batch);
    ragged = kv0 + Tile::kBlockKV > seq.seqlen_kv;
    needs_ds = (p.wanted & (kWantDq | kWantDk | kWantDbias)) != 0;
    if (threadIdx.x == 0) keep_place_in_dq(work.block, previous);
  }

  // Where this block adds to dq is kept in shared memory, for want of registers: tiles between the
  // copies of dq, and the first query tile that its copy has not seen before; the tile whose turn
  // is to be passed on, and to whom (0: there is none yet).
  __device__ uint32_t smem_place() const { return smem_k + Tile::kSmemBytes - Tile::kBytesPlace; }
  __device__ void keep_place_in_dq(int kv_block, int previous) const {
    int shift = 0, seen = kUnbounded;
    if (ws.copies > 0) {
      shift = KvDeal{ws.copies}.owner(kv_block) * static_cast<int>(ws.tiles * f.num_heads_q);
      // Ends are ascending: what an earlier block has visited ends no later.
      seen = previous < 0
                 ? 0
                 : mask.q_blocks(previous * Tile::kBlockKV, Tile::kBlockKV, Tile::kBlockQ).end;
    }
    ptx::store_shared_4(smem_place(), shift);
    ptx::store_shared_4(smem_place() + 4, seen);
    ptx::store_shared_4(smem_place() + 12, 0);
  }

  // The plain variant always computes dq, dk and dv.
  __device__ bool wants(int what) const { return !kGeneral || (p.wanted & what) != 0; }

  // ---- loads. Addresses are captured by value: see fwd_kernel.cuh.
  template <int kRows, int kWidth>
  __device__ void load(uint32_t smem, int rows_valid, int width, const void* tensor,
                       const char* first_row, int64_t row_bytes) {
    if constexpr (kGeneral) {
      if (f.unaligned) {
        const auto address = [first_row, row_bytes](int row) {
          return first_row + row * row_bytes;
        };
        load_rows_unaligned<kRows, kWidth, Tile::kThreads>(smem, rows_valid, width, address);
        return;
      }
    }
    load_tile<kRows, kWidth, Tile::kThreads>(smem, rows_valid, width, tensor, first_row, row_bytes);
  }
  __device__ static const char* row_address(const void* tensor, const Stride& s, int batch_index,
                                            int head_index, int64_t row) {
    return static_cast<const char*>(tensor) +
           2 * (batch_index * s.batch + head_index * s.head + row * s.row);
  }
  __device__ void load_kv() {
    const int64_t row = seq.kv_row0 + kv0;
    const int valid = seq.seqlen_kv - kv0;
    load<Tile::kBlockKV, Tile::kHeadDim>(smem_k, valid, f.head_dim, f.k,
                                         row_address(f.k, f.k_stride, seq.kv_batch, kv_head, row),
                                         2 * f.k_stride.row);
    load<Tile::kBlockKV, Tile::kHeadDimV>(smem_v, valid, f.head_dim_v, f.v,
                                          row_address(f.v, f.v_stride, seq.kv_batch, kv_head, row),
                                          2 * f.v_stride.row);
  }
  // Q, dO and the row statistics of a query tile.
  __device__ void load_q_tile(int h, int block, int stage) {
    const uint32_t smem = smem_stage + stage * Tile::kBytesStage;
    const int q0 = block * Tile::kBlockQ, valid = seq.seqlen_q - q0;
    const int64_t row = seq.q_row0 + q0;
    load<Tile::kBlockQ, Tile::kHeadDim>(smem, valid, f.head_dim, f.q,
                                        row_address(f.q, f.q_stride, seq.q_batch, h, row),
                                        2 * f.q_stride.row);
    load<Tile::kBlockQ, Tile::kHeadDimV>(smem + Tile::kBytesQ, valid, f.head_dim_v, p.dout,
                                         row_address(p.dout, p.dout_stride, seq.q_batch, h, row),
                                         2 * p.dout_stride.row);
    constexpr int kChunks = Tile::kBlockQ / 4;  // of 16 bytes in one statistic
    if (threadIdx.x < 2 * kChunks) {
      const int64_t first = (h * ws.tiles + tile_base + block) * Tile::kBlockQ;
      const bool second = threadIdx.x >= kChunks;
      const int chunk = threadIdx.x - (second ? kChunks : 0);
      ptx::cp_async_16(smem + Tile::kBytesQ + Tile::kBytesDo + threadIdx.x * 16,
                       (second ? ws.row_dot : ws.lse_log2) + first + chunk * 4, true);
    }
  }

  __device__ uint32_t stage_q(int stage) const { return smem_stage + stage * Tile::kBytesStage; }
  __device__ uint32_t stage_do(int stage) const { return stage_q(stage) + Tile::kBytesQ; }
  // Statistics of query columns c and c + 1 of this lane.
  __device__ float2 stat(int stage, int which, int c) const {
    return ptx::load_shared_f32x2(
        stage_do(stage) + Tile::kBytesDo +
        (which * Tile::kBlockQ + part * Tile::kWidthS + Scores::col(lane, c)) * 4);
  }

  // ---- products
  // Keys x queries: rows of `left` (keys) times rows of `right` (queries).
  template <class Smem, int kSteps, class Beside = Nothing>
  __device__ void gemm_scores(Scores (&s)[kKeyTiles], uint32_t left, uint32_t right,
                              Beside beside = {}) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) s[m].clear();
    const uint32_t a_base = left + Smem::lane_offset(lane) + key_row() * Smem::kRowBytes;
    const uint32_t b_base =
        right + Smem::lane_offset_crossed(lane) + part * Tile::kWidthS * Smem::kRowBytes;
    warp_gemm<kDType, kKeyTiles, Tile::kWidthS, kSteps>(
        s,
        [&](int k, uint32_t (&a)[kKeyTiles][4]) {
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) load_a_rows_m<Smem>(a[m], a_base, m, k);
        },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_crossed<Smem>(b, b_base, k, n); }, beside);
  }
  // acc += (keys x queries) (queries x head dim), the left side from registers...
  template <class Smem, int kWidth, class Beside = Nothing>
  __device__ void gemm_gradient(MmaFragment<kWidth> (&acc)[kKeyTiles], const Operand& left,
                                uint32_t right, Beside beside = {}) {
    const uint32_t b_base = right + Smem::lane_offset(lane);
    warp_gemm<kDType, kKeyTiles, kWidth, kStepsQ>(
        acc,
        [&](int k, uint32_t (&a)[kKeyTiles][4]) {
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[m][i] = left[m][k][i];
          }
        },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_rows_k<Smem>(b, b_base, k, n); }, beside);
  }
  // ... or, where warps share keys, from shared memory, for this warp's part of the head dim.
  template <class Smem, int kWidth>
  __device__ void gemm_gradient(MmaFragment<kWidth> (&acc)[kKeyTiles], uint32_t left,
                                uint32_t right) {
    const uint32_t a_base = left + SmemS::lane_offset(lane) + key_row() * SmemS::kRowBytes;
    const uint32_t b_base = right + Smem::lane_offset(lane);
    const int first_n = part * kWidth / 16;
    warp_gemm<kDType, kKeyTiles, kWidth, kStepsQ>(
        acc,
        [&](int k, uint32_t (&a)[kKeyTiles][4]) {
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) load_a_rows_m<SmemS>(a[m], a_base, m, k);
        },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_rows_k<Smem>(b, b_base, k, first_n + n); });
  }
  // dQ of the tile: (queries x keys) (keys x head dim), added to the workspace.
  __device__ void gemm_dq() {
    constexpr int kPairs = Tile::kWidthDq / 16;
    const int warp_m = warp % Tile::kWarpsDq, warp_n = warp / Tile::kWarpsDq;
    int64_t dq_tile = this_tile();
    bool is_new = false;
    if constexpr (kCopies) {  // asked for here, there when the products are done
      dq_tile += static_cast<int>(ptx::load_shared_4(smem_place()));
      is_new = q_block >= static_cast<int>(ptx::load_shared_4(smem_place() + 4));
    }
    float* base = ws.dq + dq_tile * (Tile::kBlockQ * Tile::kHeadDim);
    MmaFragment<Tile::kWidthDq> dq[Tile::kTilesDq];
#pragma unroll
    for (int m = 0; m < Tile::kTilesDq; ++m) dq[m].clear();
    const uint32_t a_base = smem_ds + SmemS::lane_offset_crossed(lane);
    const uint32_t b_base = smem_k + SmemK::lane_offset(lane);
    warp_gemm<kDType, Tile::kTilesDq, Tile::kWidthDq, Tile::kBlockKV / 16>(
        dq,
        [&](int k, uint32_t (&a)[Tile::kTilesDq][4]) {
#pragma unroll
          for (int m = 0; m < Tile::kTilesDq; ++m) {
            load_a_crossed<SmemS>(a[m], a_base, warp_m * Tile::kTilesDq + m, k);
          }
        },
        [&](int k, int n, uint32_t (&b)[4]) {
          load_b_rows_k<SmemK>(b, b_base, k, warp_n * kPairs + n);
        });
    const auto for_each = [&](auto add) {
#pragma unroll
      for (int m = 0; m < Tile::kTilesDq; ++m) {
#pragma unroll
        for (int t = 0; t < Tile::kWidthDq / 8; ++t) {
          const int row16 = warp_m * Tile::kTilesDq + m, col8 = warp_n * (Tile::kWidthDq / 8) + t;
          add(base + (row16 * (Tile::kHeadDim / 8) + col8) * 128, dq[m].acc[t]);
        }
      }
    };
    if (kCopies && is_new) {
      for_each([&](float* to, const float (&v)[4]) { ptx::store_accumulator(to, lane, v); });
    } else {
      for_each([&](float* to, const float (&v)[4]) { ptx::red_add_accumulator(to, lane, v); });
    }
  }
  // Deterministic order. With a copy of dq for each thread block it is that of the program: a lane
  // adds to the same elements in every KV block.
  // Without copies KV blocks add to a tile in ascending order, by turns. The grid starts them in
  // that order too, so whoever is waited for is already running. A fence waits for additions that
  // are under way, so the turn is passed on half a tile later, when they have arrived, by one
  // thread; barriers of the block lie before and behind.
  __device__ int64_t this_tile() const { return head * ws.tiles + tile_base + q_block; }
  __device__ int blocks_before() const {
    const int q0 = q_block * Tile::kBlockQ;
    return kv0 / Tile::kBlockKV - mask.kv_blocks(q0, Tile::kBlockQ, Tile::kBlockKV).begin;
  }
  // At the start of a tile.
  __device__ void ask_turn() {
    if (kTurns && ws.turn && threadIdx.x == 0)
      turns_seen = ptx::load_relaxed(ws.turn + this_tile());
  }
  // Before a barrier that additions of this tile follow, and behind one that those of the last
  // tile precede.
  __device__ void take_turn() {
    if (!kTurns || !ws.turn || threadIdx.x != 0) return;
    ptx::fence_acq_rel();  // for what has been seen, and for what has been added
    pass_turn();
    const int before = blocks_before();
    ptx::store_shared_4(smem_place() + 8, static_cast<uint32_t>(this_tile()));
    ptx::store_shared_4(smem_place() + 12, before + 1);
    if (turns_seen >= before) return;
    while (ptx::load_acquire(ws.turn + this_tile()) < before) __nanosleep(20);
  }
  // Thread 0, after a fence behind the additions of all threads.
  __device__ void pass_turn() const {
    const int turns = ptx::load_shared_4(smem_place() + 12);
    if (turns > 0) ptx::store_relaxed(ws.turn + ptx::load_shared_4(smem_place() + 8), turns);
  }

  // ---- elementwise parts
  __device__ int query0() const { return q_block * Tile::kBlockQ + part * Tile::kWidthS; }

  // First key of this warp in the block, and of its tile m in the sequence.
  __device__ int key_row() const { return key_warp * kKeyTiles * 16; }
  __device__ int key0(int m) const { return kv0 + key_row() + m * 16; }

  // Products to logits; `slope` is the derivative of the capped ones.
  __device__ void modify_scores(Scores& s, Scores& slope, int m) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        const float capped = score_mod.capped(s.at(r, c));
        slope.at(r, c) = score_mod.cap_slope(capped);
        s.at(r, c) = capped + score_mod.added(query0() + Scores::col(lane, c),
                                              key0(m) + Scores::row(lane, r));
      }
    }
  }
  __device__ void mask_scores(Scores& s, int m) {
    if (!ragged && !range.is_masked(q_block)) return;
    const int k0 = key0(m);
    apply_mask(s, lane, query0(), [&](int row, int& begin, int& end) {
      const int kv = k0 + row;
      begin = mask.q_begin(kv);
      end = kv < seq.seqlen_kv ? mask.q_end(kv) : 0;
    });
  }
  // Scores of eight queries to probabilities.
  __device__ void probabilities(float (&x)[4], float2 lse) const {
    const float scale_log2 = kGeneral ? kLog2e : f.softmax_scale * kLog2e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Rounding must not lift a probability over 1 where logits are huge.
      x[i] = ptx::ex2(fminf(fmaf(x[i], scale_log2, i % 2 ? -lse.y : -lse.x), 0.0f));
    }
  }
  // dP of eight queries to dS, given P.
  __device__ void score_gradients(float (&dp)[4], const float (&p_values)[4], float2 dot) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) dp[i] = p_values[i] * (dp[i] - (i % 2 ? dot.y : dot.x));
  }
  // Zeroes what the forward dropped and scales the rest.
  __device__ void drop(Scores& s, float keep_scale, int m) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        const bool keep =
            dropout.keep(query0() + Scores::col(lane, c), key0(m) + Scores::row(lane, r));
        s.at(r, c) *= keep ? keep_scale : 0.0f;
      }
    }
  }
  // Adds dS to the gradient of the bias. One writer an element unless the bias is broadcast.
  __device__ void add_to_dbias(const Scores& ds, int m) const {
    float* base = p.dbias + batch * p.dbias_batch_stride + head * p.dbias_head_stride;
    const bool shared = p.dbias_shared;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int kv = key0(m) + Scores::row(lane, r);
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        const int q = query0() + Scores::col(lane, c);
        if (q >= seq.seqlen_q || kv >= seq.seqlen_kv) continue;
        float* at = base + q * p.dbias_row_stride + kv * p.dbias_col_stride;
        if (shared) {
          atomicAdd(at, ds.at(r, c));
        } else {
          *at = ds.at(r, c);
        }
      }
    }
  }
  // Sixteen queries of this warp's scores as rows of keys in shared memory.
  __device__ void store_step(uint32_t smem, const uint32_t (&a)[4], int m, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = key_row() + m * 16 + lane / 4 + 8 * (i & 1);
      const int chunk = part * Tile::kWidthS / 8 + 2 * k + (i >> 1);
      ptx::store_shared_4(smem + SmemS::offset(row, chunk) + 4 * (lane % 4), a[i]);
    }
  }
  __device__ void store_scores(uint32_t smem, const Operand& a) const {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int k = 0; k < Scores::kTiles / 2; ++k) store_step(smem, a[m][k], m, k);
    }
  }
  __device__ void pack(Operand& a, const Scores (&s)[kKeyTiles]) const {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int k = 0; k < Scores::kTiles / 2; ++k) accumulators_to_a<kDType>(a[m][k], s[m], k);
    }
  }

  // ---- one query tile; returns with dS in shared memory for all to read
  // Elementwise work is spread over the products that do not wait for it.
  __device__ void tile_plain(int stage) {
    constexpr int kTiles = Scores::kTiles, kPairsS = kTiles / 2, kPairsDv = Tile::kWidthDv / 16;
    Scores s[kKeyTiles], dp[kKeyTiles];
    Operand p_regs, ds_regs;
    gemm_scores<SmemK, Tile::kHeadDim / 16>(s, smem_k, stage_q(stage));
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) mask_scores(s[m], m);

    constexpr int kStepsDp = Tile::kHeadDimV / 16 * kPairsS;
    gemm_scores<SmemV, Tile::kHeadDimV / 16>(dp, smem_v, stage_do(stage), [&](auto k, auto n) {
      constexpr int kStep = decltype(k)::value * kPairsS + decltype(n)::value;
#pragma unroll
      for (int t = kStep * kTiles / kStepsDp; t < (kStep + 1) * kTiles / kStepsDp; ++t) {
        const float2 lse = stat(stage, 0, 2 * t);
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
          probabilities(s[m].acc[t], lse);
          if (t % 2 == 0) continue;
          accumulators_to_a<kDType>(p_regs[m][t / 2], s[m], t / 2);
          if constexpr (kShared) store_step(smem_p, p_regs[m][t / 2], m, t / 2);
        }
      }
    });
    const auto gradients = [&](int t) {
      const float2 dot = stat(stage, 1, 2 * t);
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        score_gradients(dp[m].acc[t], s[m].acc[t], dot);
        if (t % 2 == 0) continue;
        accumulators_to_a<kDType>(ds_regs[m][t / 2], dp[m], t / 2);
        store_step(smem_ds, ds_regs[m][t / 2], m, t / 2);
      }
    };
    if constexpr (kShared) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) gradients(t);
      take_turn();
      __syncthreads();  // P and dS of all warps are in place
      gemm_gradient<SmemV>(dv, smem_p, stage_do(stage));
      gemm_gradient<SmemK>(dk, smem_ds, stage_q(stage));
      if constexpr (Tile::kStages == 1) __syncthreads();  // every warp is done with this tile
    } else {
      constexpr int kStepsDv = kStepsQ * kPairsDv;
      gemm_gradient<SmemV>(dv, p_regs, stage_do(stage), [&](auto k, auto n) {
        constexpr int kStep = decltype(k)::value * kPairsDv + decltype(n)::value;
#pragma unroll
        for (int t = kStep * kTiles / kStepsDv; t < (kStep + 1) * kTiles / kStepsDv; ++t) {
          gradients(t);
        }
      });
      gemm_gradient<SmemK>(dk, ds_regs, stage_q(stage));
      take_turn();
      __syncthreads();  // dS of all warps is in place, and every warp is done with this tile
    }
  }
  // The same with score modifications and for any set of gradients.
  __device__ void tile_general(int stage) {
    Operand p_regs, ds_regs;
    {
      Scores s[kKeyTiles], dp[kKeyTiles], slope[kKeyTiles];
      gemm_scores<SmemK, Tile::kHeadDim / 16>(s, smem_k, stage_q(stage));
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        modify_scores(s[m], slope[m], m);
        mask_scores(s[m], m);
#pragma unroll
        for (int t = 0; t < Scores::kTiles; ++t) probabilities(s[m].acc[t], stat(stage, 0, 2 * t));
      }
      if (needs_ds) {
        gemm_scores<SmemV, Tile::kHeadDimV / 16>(dp, smem_v, stage_do(stage));
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
          if (f.dropout_p > 0.0f) drop(dp[m], dropout.keep_scale, m);
#pragma unroll
          for (int t = 0; t < Scores::kTiles; ++t) {
            score_gradients(dp[m].acc[t], s[m].acc[t], stat(stage, 1, 2 * t));
          }
          if (wants(kWantDbias)) add_to_dbias(dp[m], m);
#pragma unroll
          for (int c = 0; c < Scores::kCols; ++c) {
            dp[m].at(0, c) *= slope[m].at(0, c);
            dp[m].at(1, c) *= slope[m].at(1, c);
          }
        }
        pack(ds_regs, dp);
      }
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        if (f.dropout_p > 0.0f) drop(s[m], dropout.keep_scale, m);
      }
      pack(p_regs, s);
    }
    if (needs_ds) store_scores(smem_ds, ds_regs);
    if constexpr (kShared) {
      store_scores(smem_p, p_regs);
      take_turn();
      __syncthreads();  // P and dS of all warps are in place
      if (wants(kWantDv)) gemm_gradient<SmemV>(dv, smem_p, stage_do(stage));
      if (wants(kWantDk)) gemm_gradient<SmemK>(dk, smem_ds, stage_q(stage));
      if constexpr (Tile::kStages == 1) __syncthreads();  // every warp is done with this tile
    } else {
      if (wants(kWantDv)) gemm_gradient<SmemV>(dv, p_regs, stage_do(stage));
      if (wants(kWantDk)) gemm_gradient<SmemK>(dk, ds_regs, stage_q(stage));
      take_turn();
      __syncthreads();  // dS of all warps is in place, and every warp is done with this tile
    }
  }
  __device__ void set_head(int h) {
    head = h;
    if constexpr (kGeneral) {
      score_mod = ScoreMod::make(f, batch, head, seq.seqlen_q, seq.seqlen_kv);
      if (f.dropout_p > 0.0f) dropout = Dropout::make(f, batch, head);
    }
  }

  __device__ void main_loop() {
    const int total = (range.end - range.begin) * group;
    load_kv();
    set_head(kv_head * group);
    q_block = range.end - 1;
    load_q_tile(head, q_block, 0);
    ptx::cp_async_commit();
    for (int i = 0; i < total; ++i) {
      const int stage = Tile::kStages == 2 ? i & 1 : 0;
      const bool last_block = q_block == range.begin;
      const int next_head = head + (last_block ? 1 : 0);
      const int next_block = last_block ? range.end - 1 : q_block - 1;
      ptx::cp_async_wait<0>();
      __syncthreads();  // this tile has arrived; every warp is done with the one before
      if (Tile::kStages == 2 && i + 1 < total) {
        load_q_tile(next_head, next_block, stage ^ 1);
        ptx::cp_async_commit();
      }
      ask_turn();
      if constexpr (kGeneral) {
        tile_general(stage);
      } else {
        tile_plain(stage);
      }
      if (Tile::kStages == 1 && i + 1 < total) {
        load_q_tile(next_head, next_block, 0);
        ptx::cp_async_commit();
      }
      if (wants(kWantDq)) gemm_dq();
      if (last_block && i + 1 < total) set_head(next_head);
      q_block = next_block;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the buffers of K and V are free
    if (kTurns && ws.turn && threadIdx.x == 0) {
      ptx::fence_acq_rel();
      pass_turn();
    }
  }

  // ---- epilogue: rows of keys through the buffer of K or V, 16 bytes at a time
  template <class Smem, int kWidth>
  __device__ void store_gradient(const MmaFragment<kWidth> (&acc)[kKeyTiles], float scale,
                                 uint32_t smem, void* tensor, const Stride& stride, int width) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int t = 0; t < kWidth / 8; ++t) {
          const int row = key_row() + m * 16 + lane / 4 + 8 * r;
          ptx::store_shared_4(
              smem + Smem::offset(row, part * kWidth / 8 + t) + 4 * (lane % 4),
              ptx::pack<kDType>(acc[m].acc[t][2 * r] * scale, acc[m].acc[t][2 * r + 1] * scale));
        }
      }
    }
    __syncthreads();  // rows are complete
    uint16_t* base = static_cast<uint16_t*>(tensor) + seq.kv_batch * stride.batch +
                     kv_head * stride.head + (seq.kv_row0 + static_cast<int64_t>(kv0)) * stride.row;
    constexpr int kLanes = Smem::kGroup;
    for (int row = threadIdx.x / kLanes; row < Tile::kBlockKV; row += Tile::kThreads / kLanes) {
      if (kv0 + row >= seq.seqlen_kv_slot) break;
#pragma unroll
      for (int j = 0; j < Smem::kChunks / kLanes; ++j) {
        const int chunk = j * kLanes + threadIdx.x % kLanes;
        if (chunk * 8 >= width) continue;
        uint32_t v[4];
        ptx::load_shared_16(v, smem + Smem::offset(row, chunk));
        ptx::store_global_16(base + row * stride.row + chunk * 8, v);
      }
    }
  }
  __device__ void store() {
    if (wants(kWantDk)) {
      store_gradient<SmemK>(dk, f.softmax_scale, smem_k, p.dk, p.dk_stride, f.head_dim);
    }
    if (wants(kWantDv)) {
      store_gradient<SmemV>(dv, 1.0f, smem_v, p.dv, p.dv_stride, f.head_dim_v);
    }
  }
};

template <class Tile, DType kDType, bool kTurns, Variant kVariant>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    bwd_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdWorkspace ws,
               const __grid_constant__ DenseSchedule schedule) {
  extern __shared__ __align__(128) char smem[];
  const FwdParams& f = p.fwd;
  WorkTile work;
  if (f.cu_seqlens_k) {
    const int blocks = gridDim.x / f.num_heads_kv;
    const int h = blockIdx.x / blocks;
    work = find_packed_block(f.cu_seqlens_k, f.batch, static_cast<int>(f.total_kv), Tile::kBlockKV,
                             blockIdx.x - h * blocks);
    work.head = h;
  } else {
    work = schedule.tile(blockIdx.x);
  }
  if (!work.valid) return;

  for (int previous = -1;;) {
    BwdBlock<Tile, kDType, kTurns, kVariant> block(p, ws, work, previous, ptx::smem_addr(smem));
#pragma unroll
    for (int m = 0; m < Tile::kKeyTiles; ++m) {
      block.dk[m].clear();
      block.dv[m].clear();
    }
    if (block.range.begin < block.range.end) block.main_loop();
    block.store();
    if (!has_dq_copies(Tile::kBlockKV) || ws.copies == 0) break;
    previous = block.kv0 / Tile::kBlockKV;
    work = {block.batch, block.kv_head, KvDeal{ws.copies}.next(previous), true};
    if (work.block * Tile::kBlockKV >= f.seqlen_kv) break;
    __syncthreads();  // every thread is done with shared memory
  }
}

}  // namespace flash_cuda::sm80
