// Warpgroups of the backward kernel that turn S into P and dP into dS, and store dV and dK.
//
// A thread has a key and half of the queries of a block; scores are transposed (keys are lanes), so
// that P^T and dS^T are the left operands of dV and dK where they lie, in tensor memory. dS also
// goes to shared memory, for dQ = dS K.
#pragma once

#include "common/tma_rows.cuh"
#include "ptx/convert.h"
#include "ptx/math.h"
#include "ptx/named_barrier.h"
#include "ptx/packed.h"
#include "ptx/tcgen05.h"
#include "ptx/tma.h"
#include "sm100/bwd_score_line.cuh"
#include "sm100/bwd_smem.cuh"
#include "sm100/bwd_store.cuh"

namespace flash_cuda::sm100 {

template <class Tile, DType kDType>
struct Scores {
  static constexpr int kN = 64;         // queries of a thread
  static constexpr int kFragment = 32;  // queries that are converted and stored together
  // Named barriers: two warps with the same keys (+ warp), a warpgroup (+ half).
  static constexpr int kPairBarrier = 1, kHalfBarrier = 5;

  const BwdSmem<Tile>& smem;
  const BwdArgs& args;
  const int half;  // of the queries
  const int warp;  // of four

  uint32_t s[kN];  // scores, then probabilities
  uint32_t blocks = 0;

  __device__ __forceinline__ int key_row() const { return threadIdx.x % 128; }
  __device__ __forceinline__ float score(int i) const { return __uint_as_float(s[i]); }
  // This warp's lanes of a column of tensor memory.
  __device__ __forceinline__ uint32_t lanes(uint32_t column) const { return column + (warp << 21); }
  // This thread's row of a panel: 16-byte chunk i is at the address ^ i << 4.
  __device__ __forceinline__ uint32_t swizzled_row(uint32_t panel) const {
    return panel + key_row() * 128 + (key_row() % 8 << 4);
  }
  // Four values of a row statistic, of this half's queries from i on.
  __device__ __forceinline__ void load_stats(float2 (&v)[2], uint32_t from, int i) const {
    uint32_t r[4];
    ptx::load_shared_16(r, from + (half * kN + i) * 4);
    v[0] = make_float2(__uint_as_float(r[0]), __uint_as_float(r[1]));
    v[1] = make_float2(__uint_as_float(r[2]), __uint_as_float(r[3]));
  }

  __device__ __forceinline__ void load_scores() {
    const uint32_t from = lanes(Tile::kTmemS + half * kN);
#pragma unroll
    for (int i = 0; i < kN; i += 32) ptx::tcgen05_ld_x32(s + i, from + i);
    ptx::tcgen05_wait_ld();
    ptx::tcgen05_loaded(s);
    // Where P of a half lies over S of the other one.
    if (Tile::kHalfP != kN) {
      ptx::tcgen05_fence_before_thread_sync();
      ptx::named_barrier_sync(kPairBarrier + warp, 64);
      ptx::tcgen05_fence_after_thread_sync();
    }
  }

  // P = 2^(S * factor - lse), rounded to tensor memory and as it is in place. With a cap its
  // derivative then joins the latter, where only dS takes it from.
  __device__ __forceinline__ void probabilities(float factor, uint32_t stage) {
    const float2 minus_factor = make_float2(-factor, -factor);
    const bool capped = Tile::kGeneral && args.params.fwd.softcap > 0.0f;
#pragma unroll
    for (int c = 0; c < kN; c += kFragment) {
      uint32_t packed[kFragment / 2];
#pragma unroll
      for (int i = 0; i < kFragment; i += 4) {
        float2 lse[2];
        load_stats(lse, smem.lse(stage), c + i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = c + i + 2 * j;
          const float2 x = make_float2(score(at), score(at + 1));
          // Negated, so that lse needs no negation and a row without keys (+inf) gives 0.
          const float2 y = ptx::fma2(x, minus_factor, lse[j]);
          float2 p = make_float2(ptx::ex2(-y.x), ptx::ex2(-y.y));
          packed[i / 2 + j] = ptx::pack<kDType>(p.x, p.y);
          if (capped) p = with_cap_slope(p, x);
          s[at] = __float_as_uint(p.x);
          s[at + 1] = __float_as_uint(p.y);
        }
      }
      ptx::tcgen05_st_x16(lanes(Tile::kTmemS + half * Tile::kHalfP + c / 2), packed);
    }
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    smem.tell_issuer(kBwdPReady);
  }

  // dS = P (dP - delta), to tensor memory over dP and to shared memory as rows of keys.
  __device__ __forceinline__ void score_gradients(uint32_t stage, int head, int first_query) {
    uint32_t shared[Tile::kPair ? kN / 2 : 1];  // kept until the last dS has been read
#pragma unroll
    for (int c = 0; c < kN; c += kFragment) {
      uint32_t dp[kFragment], packed[kFragment / 2];
      ptx::tcgen05_ld_x32(dp, lanes(Tile::kTmemDp + half * kN + c));
      ptx::tcgen05_wait_ld();
      ptx::tcgen05_loaded(dp);
#pragma unroll
      for (int i = 0; i < kFragment; i += 4) {
        float2 delta[2];
        load_stats(delta, smem.delta(stage), c + i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = i + 2 * j;
          const float2 x = make_float2(__uint_as_float(dp[at]), __uint_as_float(dp[at + 1]));
          const float2 less = ptx::fma2(delta[j], make_float2(-1.0f, -1.0f), x);
          const float2 ds = ptx::mul2(make_float2(score(c + at), score(c + at + 1)), less);
          dp[at] = __float_as_uint(ds.x);
          dp[at + 1] = __float_as_uint(ds.y);
        }
      }
      if (Tile::kGeneral && args.params.dbias) {
        const BwdTask& t = smem.task();
        ScoreLine<true, kFragment>{dp, first_query + c, t.kv0 + key_row()}.add_to_dbias(
            args.params, t.batch, head, t.seq.seqlen_q, t.seq.seqlen_kv);
      }
#pragma unroll
      for (int i = 0; i < kFragment; i += 2) {
        packed[i / 2] = ptx::pack<kDType>(__uint_as_float(dp[i]), __uint_as_float(dp[i + 1]));
      }
      ptx::tcgen05_st_x16(lanes(Tile::kTmemDp + half * Tile::kHalfDs + c / 2), packed);
      if constexpr (Tile::kPair) {
#pragma unroll
        for (int i = 0; i < kFragment / 2; ++i) shared[c / 2 + i] = packed[i];
      } else {
        store_ds(smem.ds() + half * Tile::kPanelBytes, packed, c);
      }
    }
    ptx::tcgen05_wait_st();
    if (!Tile::kPair) ptx::fence_proxy_async_shared();
    ptx::tcgen05_fence_before_thread_sync();
    smem.tell_issuer(kBwdDsReady);
    if constexpr (Tile::kPair) {
      if (args.workspace.dq) share_ds(shared);
    }
  }
  // This thread's row of dS, from query c of this half on.
  template <int kWords>
  __device__ __forceinline__ void store_ds(uint32_t panel, const uint32_t (&packed)[kWords],
                                           int c) const {
    const uint32_t row = swizzled_row(panel);
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint32_t* from = packed + 4 * i;
      ptx::store_shared_16(row ^ ((c / 8 + i) << 4), {from[0], from[1], from[2], from[3]});
    }
  }
  // dS of a half goes to the block of the pair that adds up dQ of those queries.
  __device__ __forceinline__ void share_ds(const uint32_t (&packed)[kN / 2]) const {
    const int rank = ptx::cluster_block_rank();
    const bool own = half == rank;
    const uint32_t panel = smem.ds() + rank * Tile::kPanelBytes;  // of this block's keys, in either
    // dQ of the block before has read what is written here and by the copy.
    if (blocks > 0) ptx::mbarrier_wait(smem.barrier(kBwdDqFull), (blocks - 1) % 2);
    store_ds(own ? panel : smem.outgoing(), packed, 0);
    ptx::fence_proxy_async_shared();
    if (own) return smem.tell_issuer(kBwdExchanged);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      constexpr int kBytes = 32 * 128;  // a warp's rows
      const uint32_t peer = rank ^ 1;
      ptx::bulk_copy_to_peer(ptx::mapa(panel + warp * kBytes, peer),
                             smem.outgoing() + warp * kBytes, kBytes,
                             ptx::mapa(smem.barrier(kBwdArrived), peer));
    }
  }

  // The task stays in shared memory: what only masked blocks need is read there again.
  __device__ __forceinline__ void step(int head, int q_block, bool masked) {
    const RingPlace<Tile::kStagesStats> place{blocks};
    const uint32_t stage = place.stage();
    const int first_query = q_block * Tile::kBlockQ + half * kN;
    ptx::mbarrier_wait(smem.barrier(kBwdSFull), blocks % 2);
    ptx::tcgen05_fence_after_thread_sync();
    load_scores();
    const BwdTask& task = smem.task();
    const ScoreLine<true, kN> line{s, first_query, task.kv0 + key_row()};
    if constexpr (Tile::kGeneral) {
      line.modify(
          ScoreMod::make(args.params.fwd, task.batch, head, task.seq.seqlen_q, task.seq.seqlen_kv));
    }
    if (masked) line.hide(task.mask);
    ptx::mbarrier_wait(smem.barrier(kBwdStatsFull, stage), place.phase());
    probabilities(exponent_factor<Tile::kGeneral>(args.params.fwd), stage);
    ptx::mbarrier_wait(smem.barrier(kBwdDpFull), blocks % 2);
    ptx::tcgen05_fence_after_thread_sync();
    score_gradients(stage, head, first_query);
    ++blocks;
  }

  // A panel of 64 columns of dV or dK, through `staging` to global memory.
  template <int kColumns>
  __device__ __forceinline__ void store_panel(const CUtensorMap* map, const MapRows& at,
                                              uint32_t column, int panel, uint32_t staging,
                                              float scale) {
    const uint32_t row = swizzled_row(staging);
#pragma unroll
    for (int c = 0; c < kColumns; c += 32)
      stage_columns<kDType>(row, c / 8, lanes(column + c), scale);
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(kHalfBarrier + half, 128);
    if (key_row() == 0) {
      store_rows(map, staging, panel * Tile::kPanelCols, smem.task().kv0, at);
      ptx::bulk_commit_group();
    }
  }
  // The panels of dV and then dK, alternately one of each half's.
  template <int kHeadDim, int kFirst>
  __device__ __forceinline__ void store_gradient(const CUtensorMap* map, const RowMap& rows,
                                                 uint32_t column, uint32_t staging, float scale) {
    const BwdTask& task = smem.task();
    const MapRows at =
        rows.locate(task.seq.kv_row0, task.seq.seqlen_kv_slot, task.kv_head, task.seq.kv_batch);
#pragma unroll
    for (int c = 0; c < kHeadDim; c += Tile::kPanelCols) {
      const int panel = c / Tile::kPanelCols;
      if ((kFirst + panel) % 2 != half) continue;
      constexpr int kRest = kHeadDim % Tile::kPanelCols;
      const uint32_t to = staging + panel * Tile::kPanelBytes;
      if (kRest != 0 && c + Tile::kPanelCols > kHeadDim) {
        store_panel<kRest>(map, at, column + c, panel, to, scale);
      } else {
        store_panel<Tile::kPanelCols>(map, at, column + c, panel, to, scale);
      }
    }
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (BwdSteps at(smem.task()); at.left > 0; at.next()) {
      step(at.head, at.q_block, smem.task().blocks.is_masked(at.q_block));
    }
    const BwdParams& p = args.params;
    ptx::mbarrier_wait(smem.barrier(kBwdDvFull), 0);
    ptx::tcgen05_fence_after_thread_sync();
    if (p.dv) {
      store_gradient<Tile::kHeadDimV, 0>(&args.dv_map, args.dv_rows, Tile::kTmemDv, smem.dout(0),
                                         1.0f);
    }
    ptx::mbarrier_wait(smem.barrier(kBwdDkFull), 0);
    ptx::tcgen05_fence_after_thread_sync();
    if (p.dk) {
      store_gradient<Tile::kHeadDim, Tile::kPanelsV>(&args.dk_map, args.dk_rows, Tile::kTmemDk,
                                                     smem.q(0), p.fwd.softmax_scale);
    }
    if (key_row() == 0) {
      ptx::bulk_wait_group<0>();
    }
  }
};

}  // namespace flash_cuda::sm100
