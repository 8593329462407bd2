// Warps of the backward for head dims up to 256 that turn S into P and dP into dS, and store the
// gradients.
//
// Scores are folded: lane l has row l % 64, and those of the passing rows that its half of the
// lanes has. P and dS go to shared memory as left operands.
#pragma once

#include "common/tma_rows.cuh"
#include "ptx/convert.h"
#include "ptx/math.h"
#include "ptx/named_barrier.h"
#include "ptx/packed.h"
#include "ptx/smem_addr.h"
#include "ptx/tcgen05.h"
#include "ptx/tma.h"
#include "sm100/bwd_score_line.cuh"
#include "sm100/bwd_store.cuh"
#include "sm100/bwd_wide_smem.cuh"

namespace flash_cuda::sm100 {

template <class Tile, DType kDType>
struct WideScores {
  static constexpr int kN = 32;  // scores of a thread
  // Named barriers: two warps with the same columns of a gradient (+ panel).
  static constexpr int kPanelBarrier = 1;

  const BwdWideSmem<Tile>& smem;
  const BwdWideArgs& args;
  const int warp;  // of eight
  const int rank;  // of this block in the pair

  float lse = 0.0f, delta = 0.0f;  // of this thread's query, where queries stay
  uint32_t blocks = 0;

  __device__ __forceinline__ int row() const { return warp % 2 * 32 + threadIdx.x % 32; }
  __device__ __forceinline__ int half() const { return warp % 4 / 2; }  // of the lanes
  __device__ __forceinline__ int quarter() const { return warp / 4; }   // of the columns there
  __device__ __forceinline__ int stay_row() const {
    return smem.task().row0 + rank * Tile::kRows + row();
  }
  // The first of this thread's rows of a passing block.
  __device__ __forceinline__ int first() const { return half() * 64 + quarter() * kN; }
  __device__ __forceinline__ uint32_t lanes(uint32_t column) const {
    return column + (warp % 4 << 21);
  }

  __device__ __forceinline__ void load(uint32_t (&v)[kN], uint32_t column) const {
    ptx::tcgen05_ld_x32(v, lanes(column + quarter() * kN));
    ptx::tcgen05_wait_ld();
    ptx::tcgen05_loaded(v);
  }
  // Four values of a row statistic, from this thread's query i on.
  __device__ __forceinline__ void load_stats(float2 (&v)[2], uint32_t from, float mine,
                                             int i) const {
    if constexpr (Tile::kKeysStay) {
      uint32_t r[4];
      ptx::load_shared_16(r, from + (first() + i) * 4);
      v[0] = make_float2(__uint_as_float(r[0]), __uint_as_float(r[1]));
      v[1] = make_float2(__uint_as_float(r[2]), __uint_as_float(r[3]));
    } else {
      v[0] = v[1] = make_float2(mine, mine);
    }
  }
  // This thread's scores as part of a left operand with 64 rows.
  __device__ __forceinline__ void store(uint32_t tile, const uint32_t (&packed)[kN / 2]) const {
    const uint32_t to = tile + half() * Tile::kBoxBytes + row() * 128 + (row() % 8 << 4);
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const uint32_t* from = packed + 4 * i;
      ptx::store_shared_16(to ^ ((quarter() * (kN / 8) + i) << 4),
                           {from[0], from[1], from[2], from[3]});
    }
    ptx::fence_proxy_async_shared();
  }

  // Scores or what takes their place, of a passing block.
  __device__ __forceinline__ ScoreLine<Tile::kKeysStay, kN> line(uint32_t (&s)[kN],
                                                                 int block) const {
    const int mine = stay_row(), from = block * Tile::kBlock + first();
    return Tile::kKeysStay ? ScoreLine<Tile::kKeysStay, kN>{s, from, mine}
                           : ScoreLine<Tile::kKeysStay, kN>{s, mine, from};
  }

  // P = 2^(S * factor - lse), rounded and in place, there with the slope of a cap.
  __device__ __forceinline__ void probabilities(uint32_t (&s)[kN], uint32_t (&packed)[kN / 2],
                                                uint32_t stage) const {
    const float factor = exponent_factor<Tile::kGeneral>(args.params.fwd);
    const bool capped = Tile::kGeneral && args.params.fwd.softcap > 0.0f;
    const float2 minus_factor = make_float2(-factor, -factor);
#pragma unroll
    for (int i = 0; i < kN; i += 4) {
      float2 of[2];
      load_stats(of, smem.lse(stage), lse, i);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = i + 2 * j;
        const float2 x = make_float2(__uint_as_float(s[at]), __uint_as_float(s[at + 1]));
        // Negated, so that lse needs no negation and a row without keys (+inf) gives 0.
        const float2 y = ptx::fma2(x, minus_factor, of[j]);
        float2 p = make_float2(ptx::ex2(-y.x), ptx::ex2(-y.y));
        packed[at / 2] = ptx::pack<kDType>(p.x, p.y);
        if (capped) p = with_cap_slope(p, x);
        s[at] = __float_as_uint(p.x);
        s[at + 1] = __float_as_uint(p.y);
      }
    }
  }
  // dS = P (dP - delta), over dP and rounded.
  __device__ __forceinline__ void score_gradients(const uint32_t (&p)[kN], uint32_t (&dp)[kN],
                                                  uint32_t (&packed)[kN / 2],
                                                  uint32_t stage) const {
#pragma unroll
    for (int i = 0; i < kN; i += 4) {
      float2 of[2];
      load_stats(of, smem.delta(stage), delta, i);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = i + 2 * j;
        const float2 x = make_float2(__uint_as_float(dp[at]), __uint_as_float(dp[at + 1]));
        const float2 less = ptx::fma2(of[j], make_float2(-1.0f, -1.0f), x);
        const float2 ds =
            ptx::mul2(make_float2(__uint_as_float(p[at]), __uint_as_float(p[at + 1])), less);
        packed[at / 2] = ptx::pack<kDType>(ds.x, ds.y);
        dp[at] = __float_as_uint(ds.x);
        dp[at + 1] = __float_as_uint(ds.y);
      }
    }
  }

  // The product that read the last P or dS is done.
  __device__ __forceinline__ void wait_read(int which) const {
    if (blocks > 0) ptx::mbarrier_wait(smem.barrier(kWideColumnsEmpty, which), (blocks - 1) % 2);
  }

  // head: of the queries.
  __device__ __forceinline__ void step(int block, int head) {
    const BwdWideTask& t = smem.task();
    const uint32_t stage = blocks % Tile::kStagesStats;
    uint32_t s[kN], dp[kN], packed[kN / 2];
    ptx::mbarrier_wait(smem.barrier(kWideSFull), blocks % 2);
    ptx::tcgen05_fence_after_thread_sync();
    load(s, Tile::kTmemS);
    if constexpr (!Tile::kKeysStay) {
      ptx::tcgen05_fence_before_thread_sync();
      smem.tell_issuer(kWidePReady);
    }
    if constexpr (Tile::kGeneral) {
      line(s, block).modify(
          ScoreMod::make(args.params.fwd, t.batch, head, t.seq.seqlen_q, t.seq.seqlen_kv));
    }
    if (t.blocks.is_masked(block)) line(s, block).hide(t.mask);
    if constexpr (Tile::kKeysStay) {
      ptx::mbarrier_wait(smem.barrier(kWideStatsFull, stage), blocks / Tile::kStagesStats % 2);
    }
    probabilities(s, packed, stage);
    if constexpr (Tile::kKeysStay) {
      wait_read(1);
      store(smem.p(), packed);
      ptx::tcgen05_fence_before_thread_sync();
      smem.tell_issuer(kWidePReady);
    }
    ptx::mbarrier_wait(smem.barrier(kWideDpFull), blocks % 2);
    ptx::tcgen05_fence_after_thread_sync();
    load(dp, Tile::kTmemDp);
    score_gradients(s, dp, packed, stage);
    if constexpr (Tile::kGeneral && Tile::kKeysStay) {
      if (args.params.dbias) {
        line(dp, block).add_to_dbias(args.params, t.batch, head, t.seq.seqlen_q, t.seq.seqlen_kv);
      }
    }
    wait_read(0);
    store(smem.ds(), packed);
    ptx::tcgen05_fence_before_thread_sync();
    smem.tell_issuer(kWideDsReady);
    ++blocks;
  }

  // 64 rows x 64 columns of a gradient by two warps, through shared memory.
  __device__ __forceinline__ void store_gradient(const WideTensor& to, uint32_t column,
                                                 uint32_t staging, float scale) const {
    const BwdWideTask& t = smem.task();
    const int panel = 2 * half() + quarter();
    const uint32_t box = staging + panel * Tile::kBoxBytes;
    const uint32_t mine = box + row() * 128 + (row() % 8 << 4);
#pragma unroll
    for (int c = 0; c < 64; c += 32)
      stage_columns<kDType>(mine, c / 8, lanes(column + quarter() * 64 + c), scale);
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(kPanelBarrier + panel, 64);
    if (row() == 0) {
      const MapRows at =
          Tile::kKeysStay
              ? to.rows.locate(t.seq.kv_row0, t.seq.seqlen_kv_slot, t.head, t.seq.kv_batch)
              : to.rows.locate(t.seq.q_row0, t.seq.seqlen_q_slot, t.head, t.seq.q_batch);
      store_rows(&to.map, box, panel * Tile::kBox, t.row0 + rank * Tile::kRows, at);
      ptx::bulk_commit_group();
    }
  }

  __device__ __forceinline__ void run() {
    const BwdWideTask& t = smem.task();
    const BwdParams& p = args.params;
    if constexpr (!Tile::kKeysStay) {
      const int64_t tile = t.head * args.workspace.tiles + t.tile_base + t.row0 / Tile::kBlock;
      const int64_t at = tile * Tile::kBlock + rank * Tile::kRows + row();
      lse = args.workspace.lse_log2[at];
      delta = args.workspace.row_dot[at];
    }
#pragma unroll 1
    for (BwdWideSteps at(t); at.left > 0; at.next()) {
      step(at.block, Tile::kKeysStay ? at.head : t.head);
    }
    ptx::mbarrier_wait(smem.barrier(kWideDone), 0);
    ptx::tcgen05_fence_after_thread_sync();
    if (!Tile::kKeysStay || p.dk) {
      store_gradient(args.grad[0], Tile::kTmemGrad, smem.rows(0), p.fwd.softmax_scale);
    }
    if (Tile::kKeysStay && p.dv) {
      store_gradient(args.grad[1], Tile::kTmemGrad + 128, smem.rows(1), 1.0f);
    }
    if (row() == 0) ptx::bulk_wait_group<0>();
  }
};

}  // namespace flash_cuda::sm100
