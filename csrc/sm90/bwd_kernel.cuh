// Backward attention with TMA and wgmma (Hopper).
//
// One thread block owns kBlockKV keys of one KV head. Its K and V stay in shared memory and its
// dK and dV in registers while Q and dO of every query head of the group stream past in blocks of
// kBlockQ rows. Scores are computed transposed (S^T = K Q^T, dP^T = V dO^T), so that P^T and dS^T
// come out of the accumulators as the register operand of dV += P^T dO and dK += dS^T Q; only dS
// passes through shared memory, for dQ += dS K.
//
// Warpgroup 0: warp 0 loads (TMA), warps 1 and 2 add dQ to the float32 workspace (bulk reduce),
// warp 3 zeroes rows behind a sequence.
// Warpgroups 1 and 2: 64 keys each, and one half of dQ each.
//
// Two things order the loop (docs/kernels/sm90_bwd.md has the timeline): lse is in registers
// before the score GEMMs are issued, because shared-memory reads starve behind them, and the
// accumulators of dP start at -delta, which saves the subtraction.
#pragma once

#include "common/mask.h"
#include "common/seqlen.h"
#include "ptx/convert.h"
#include "ptx/fence.h"
#include "ptx/griddep.h"
#include "ptx/math.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/smem_addr.h"
#include "ptx/stmatrix.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "sm90/bwd_tile.h"
#include "sm90/bwd_work.cuh"

namespace flash_cuda::sm90 {

// Shared memory of one block, as byte offsets from a 1024-byte boundary. Operand tiles are panels
// of 64 columns, [rows][128 bytes], in the 128-byte swizzle.
template <class Tile>
struct BwdSmem {
  static constexpr int kKvBytes = Tile::kBlockKV * Tile::kHeadDim * 2;
  static constexpr int kQBytes = Tile::kBlockQ * Tile::kHeadDim * 2;
  static constexpr int kDsBytes = Tile::kBlockKV * Tile::kBlockQ * 2;
  static constexpr int kDqBytes = Tile::kBlockQ * Tile::kHeadDim * 4;
  static constexpr int kRowBytes = Tile::kBlockQ * 4;
  static constexpr int kK = 0, kV = kK + kKvBytes;
  static constexpr int kQ = kV + kKvBytes, kDout = kQ + Tile::kStages * kQBytes;
  static constexpr int kDs = kDout + Tile::kStages * kQBytes;  // one buffer a stage
  static constexpr int kDq = kDs + Tile::kStages * kDsBytes;
  static constexpr int kLse = kDq + kDqBytes, kDelta = kLse + Tile::kStages * kRowBytes;
  static constexpr int kBarriers = kDelta + Tile::kStages * kRowBytes;
  static constexpr int kTask = kBarriers + 8 * BwdBarriers<Tile>::kCount;
  static constexpr int kBytes = (kTask + sizeof(BwdTask<Tile>) + 15) / 16 * 16;
  static_assert(kBytes <= 232448, "shared memory of an SM");
};

enum BwdNamedBarrier : int {
  kDsReady = 1,   // both warpgroups have written their part of dS
  kDqFull = 2,    // + warpgroup: dQ lies in the staging buffer
  kDqEmpty = 4,   // + warpgroup: the staging buffer may be rewritten
  kKvDone = 6,    // no GEMM reads K and V any more
  kOutReady = 7,  // + warpgroup: dK or dV lies in shared memory
};

// Zeroes the rows [first, kRows) of an operand tile, so that what lies behind a sequence (possibly
// NaN) meets the zero probabilities of its rows as zero. `thread` of kThreads.
template <int kRows, int kHeadDim, int kThreads>
__device__ __forceinline__ void zero_tail_rows(uint8_t* tile, int first, int thread) {
  constexpr int kChunks = kHeadDim / 8;  // of 16 bytes; the swizzle permutes them inside a row
  for (int i = first * kChunks + thread; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    *reinterpret_cast<uint4*>(tile + (chunk / 8) * kRows * 128 + row * 128 + (chunk % 8) * 16) =
        make_uint4(0, 0, 0, 0);
  }
}

template <class Tile, DType kDType>
struct BwdConsumer {
  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  static constexpr int kHeadDim = Tile::kHeadDim, kBlockQ = Tile::kBlockQ;
  static constexpr int kBlockKV = Tile::kBlockKV;
  static constexpr int kScores = kBlockQ / 2;  // S^T and dP^T accumulators a thread
  static constexpr int kOut = kHeadDim / 2;    // dK and dV accumulators a thread
  // A warpgroup takes half of dQ: half of the columns of a 64-row block, or 64 of 128 rows.
  static constexpr bool kSplitDqRows = kBlockQ == 128;
  static constexpr int kDqCols = kSplitDqRows ? kHeadDim : kHeadDim / 2;
  using Smem = BwdSmem<Tile>;

  // Descriptors: K-major operands, and MN-major ones with their panel distance.
  static constexpr uint64_t kDescK = ptx::wgmma_desc_base(16, 1024, ptx::kDescSwizzle128);
  static constexpr uint64_t kDescQ =
      ptx::wgmma_desc_base(kBlockQ * 128, 1024, ptx::kDescSwizzle128);
  static constexpr uint64_t kDescKv =
      ptx::wgmma_desc_base(kBlockKV * 128, 1024, ptx::kDescSwizzle128);

  const BwdArgs& args;
  const uint32_t smem;
  uint8_t* const smem_ptr;
  const int warpgroup, thread;  // 0 or 1; in the warpgroup

  float dk[kOut], dv[kOut], scores[kScores], dp[kScores];
  uint32_t p16[kScores / 8][4], ds16[kScores / 8][4];  // A operands, one row a k-step

  __device__ static void pin_operand(uint32_t (&a)[kScores / 8][4]) {
#pragma unroll
    for (int k = 0; k < kScores / 8; ++k) ptx::pin(a[k]);
  }
  __device__ static int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
  __device__ int lane() const { return thread & 31; }
  __device__ int warp() const { return thread >> 5; }
  // First of the two keys of this thread in the block; the other is 8 further.
  __device__ int key_row() const { return warpgroup * 64 + warp() * 16 + lane() / 4; }

  // acc = A B^T over head_dim, A: 64 keys of this warpgroup, B: kBlockQ rows. `fresh`: from zero.
  template <bool kFresh>
  __device__ void gemm_scores(float (&acc)[kScores], int a_tile, uint32_t b_tile) {
    const uint64_t a = ptx::wgmma_desc(smem + a_tile + warpgroup * 64 * 128, kDescK);
    const uint64_t b = ptx::wgmma_desc(b_tile, kDescK);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const uint64_t ak = a + (k / 4) * (kBlockKV * 8) + (k % 4) * 2;
      const uint64_t bk = b + (k / 4) * (kBlockQ * 8) + (k % 4) * 2;
      if (kFresh && k == 0) {
        ptx::Wgmma<kBlockQ>::template ss_zero<kBf16, 0, 0>(acc, ak, bk);
      } else {
        ptx::Wgmma<kBlockQ>::template ss<kBf16, 0, 0>(acc, ak, bk);
      }
    }
  }

  // acc += A B over the kBlockQ rows, A from registers (P^T or dS^T), B: dO or Q as [row][column].
  __device__ void gemm_out(float (&acc)[kOut], const uint32_t (&a)[kScores / 8][4],
                           uint32_t b_tile) {
    const uint64_t b = ptx::wgmma_desc(b_tile, kDescQ);
#pragma unroll
    for (int k = 0; k < kBlockQ / 16; ++k) {
      ptx::Wgmma<kHeadDim>::template rs<kBf16, 1>(acc, a[k], b + k * 128);
    }
  }

  // dQ = dS K over the keys of both warpgroups, this warpgroup's half of it.
  __device__ void gemm_dq(float (&dq)[kDqCols / 2], int stage) {
    const uint32_t ds = smem + Smem::kDs + stage * Smem::kDsBytes;
    const uint64_t a =
        ptx::wgmma_desc(ds + (kSplitDqRows ? warpgroup * kBlockKV * 128 : 0), kDescKv);
    // Half the columns: the second panel, or the second half of the only one.
    constexpr int kHalf = kHeadDim == 128 ? kBlockKV * 128 : kDqCols * 2;
    const uint64_t b =
        ptx::wgmma_desc(smem + Smem::kK + (kSplitDqRows ? 0 : warpgroup * kHalf), kDescKv);
#pragma unroll
    for (int k = 0; k < kBlockKV / 16; ++k) {
      if (k == 0) {
        ptx::Wgmma<kDqCols>::template ss_zero<kBf16, 1, 1>(dq, a, b);
      } else {
        ptx::Wgmma<kDqCols>::template ss<kBf16, 1, 1>(dq, a + k * 128, b + k * 128);
      }
    }
  }

  // Accumulators of dP^T start at -delta of their column.
  __device__ void preset_dp(int stage) {
    const float2* delta =
        reinterpret_cast<const float2*>(smem_ptr + Smem::kDelta + stage * Smem::kRowBytes) +
        lane() % 4;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 d = delta[4 * j];
      dp[4 * j] = dp[4 * j + 2] = d.x;
      dp[4 * j + 1] = dp[4 * j + 3] = d.y;
    }
    ptx::pin(dp);
  }

  __device__ float2 lse_of_column(int stage, int j) const {
    return reinterpret_cast<const float2*>(smem_ptr + Smem::kLse +
                                           stage * Smem::kRowBytes)[4 * j + lane() % 4];
  }

  // Columns (queries) outside a key's interval get -inf.
  __device__ void mask_scores(const Mask& mask, int q0, int kv0) {
    const int key = kv0 + key_row(), col = q0 + 2 * (lane() % 4);
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int kv = key + 8 * r;
      begin[r] = mask.q_begin(kv) - col;
      end[r] = kv < mask.seqlen_kv ? mask.q_end(kv) - col : begin[r];
    }
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int q = 8 * j + e % 2;
        if (q < begin[e / 2] || q >= end[e / 2]) scores[4 * j + e] = args.masked_score;
      }
    }
  }

  // P^T = exp2(S^T * scale_log2 - lse2), also as 16-bit operand.
  __device__ void probabilities(float scale_log2, int stage, const float2* lse) {
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 l = Tile::kLseInRegisters ? lse[j] : lse_of_column(stage, j);
      float* s = scores + 4 * j;
      s[0] = ptx::ex2(fmaf(s[0], scale_log2, -l.x));
      s[1] = ptx::ex2(fmaf(s[1], scale_log2, -l.y));
      s[2] = ptx::ex2(fmaf(s[2], scale_log2, -l.x));
      s[3] = ptx::ex2(fmaf(s[3], scale_log2, -l.y));
      p16[j / 2][j % 2 * 2] = ptx::pack<kDType>(s[0], s[1]);
      p16[j / 2][j % 2 * 2 + 1] = ptx::pack<kDType>(s[2], s[3]);
    }
  }

  // dS^T = P^T o dP^T, where dP^T already is less delta.
  __device__ void score_gradients() {
#pragma unroll
    for (int j = 0; j < kScores / 2; ++j) {
      ds16[j / 4][j % 4] =
          ptx::pack<kDType>(scores[2 * j] * dp[2 * j], scores[2 * j + 1] * dp[2 * j + 1]);
    }
  }

  // dS as [key][row], rows contiguous, in panels of 64 rows.
  __device__ void store_ds(int stage) {
    const int key = warpgroup * 64 + warp() * 16 + lane() % 16;
    const uint32_t base = smem + Smem::kDs + stage * Smem::kDsBytes + key * 128;
#pragma unroll
    for (int c = 0; c < kBlockQ / 16; ++c) {
      const int chunk = (c % 4) * 2 + lane() / 16;
      ptx::stmatrix_x4(base + (c / 4) * kBlockKV * 128 + ((chunk ^ (key & 7)) << 4), ds16[c]);
    }
  }

  // Hands dQ to the store warp: 16 bytes a thread and column group, in accumulator order.
  __device__ void stage_dq(const float (&dq)[kDqCols / 2]) {
    ptx::named_barrier_sync(kDqEmpty + warpgroup, 160);
    float4* staging =
        reinterpret_cast<float4*>(smem_ptr + Smem::kDq + warpgroup * (Smem::kDqBytes / 2));
#pragma unroll
    for (int i = 0; i < kDqCols / 8; ++i) {
      staging[i * 128 + thread] =
          make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_arrive(kDqFull + warpgroup, 160);
  }

  // One block of Q and dO in `stage`, whose barriers are in phase `phase`.
  __device__ void step(const BwdTask<Tile>& task, int q0, bool masked, int stage, uint32_t phase) {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    const uint32_t q_tile = smem + Smem::kQ + stage * Smem::kQBytes;
    const uint32_t dout_tile = smem + Smem::kDout + stage * Smem::kQBytes;
    float2 lse[Tile::kLseInRegisters ? kScores / 4 : 1];

    ptx::mbarrier_wait(bars.q_full(stage), phase);
    if constexpr (Tile::kLseInRegisters) {
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) lse[j] = lse_of_column(stage, j);
    }
    ptx::mbarrier_wait(bars.dout_full(stage), phase);
    preset_dp(stage);
    ptx::wgmma_fence();
    gemm_scores<true>(scores, Smem::kK, q_tile);
    ptx::wgmma_commit_group();
    gemm_scores<false>(dp, Smem::kV, dout_tile);
    ptx::wgmma_commit_group();

    ptx::wgmma_wait_group<1>();
    ptx::pin(scores);
    if (masked) {
      mask_scores(task.mask, q0, task.kv0);
      __syncwarp();
    }
    probabilities(args.scale_log2, stage, lse);
    ptx::wgmma_wait_group<0>();
    ptx::pin(dp);
    score_gradients();
    store_ds(stage);

    ptx::pin(dv);
    pin_operand(p16);
    ptx::wgmma_fence();
    gemm_out(dv, p16, dout_tile);
    ptx::wgmma_commit_group();
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(kDsReady,
                            256);  // dS is whole; dS(i-1) in the other buffer is done with

    float dq[kDqCols / 2];
    ptx::wgmma_fence();
    gemm_dq(dq, stage);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();  // dV has taken dO
    ptx::pin(dv);
    pin_operand(p16);
    if (thread == 0) ptx::mbarrier_arrive(bars.dout_empty(stage));
    ptx::pin(dk);
    pin_operand(ds16);
    ptx::wgmma_fence();
    gemm_out(dk, ds16, q_tile);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::pin(dq);
    stage_dq(dq);
    ptx::wgmma_wait_group<0>();  // dK has taken Q
    ptx::pin(dk);
    pin_operand(ds16);
    if (thread == 0) ptx::mbarrier_arrive(bars.q_empty(stage));
  }

  // The loop's own values stay in registers: a read of the task in it would wait behind the GEMMs.
  __device__ void accumulate(const BwdTask<Tile>& task) {
    const int full_begin = task.blocks.full_begin, full_end = task.blocks.full_end;
    ptx::mbarrier_wait(BwdBarriers<Tile>{smem + Smem::kBarriers}.kv_full(), 0);
#pragma unroll 1
    for (BwdSteps<Tile> at(task); at.left > 0; at.next()) {
      const bool masked = at.q_block < full_begin || at.q_block >= full_end;
      step(task, at.q_block * kBlockQ, masked, uniform(at.stage), at.phase);
    }
  }

  // Through shared memory (the place of K or V), so that whole rows are stored.
  __device__ void store_out(float (&acc)[kOut], int tile, float scale, void* out, Stride stride,
                            const BwdTask<Tile>& task) {
    const int row = warpgroup * 64 + warp() * 16 + lane() % 16;
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c) {
      const int chunk = (c % 4) * 2 + lane() / 16;
      const float* a = acc + 8 * c;
      ptx::stmatrix_x4(
          smem + tile + (c / 4) * kBlockKV * 128 + row * 128 + ((chunk ^ (row & 7)) << 4),
          {ptx::pack<kDType>(a[0] * scale, a[1] * scale),
           ptx::pack<kDType>(a[2] * scale, a[3] * scale),
           ptx::pack<kDType>(a[4] * scale, a[5] * scale),
           ptx::pack<kDType>(a[6] * scale, a[7] * scale)});
    }
    ptx::named_barrier_sync(kOutReady + warpgroup, 128);
    constexpr int kChunks = kHeadDim / 8;
    char* const base =
        static_cast<char*>(out) + 2 * (task.kv_batch * stride.batch + task.kv_head * stride.head);
#pragma unroll 4
    for (int i = thread; i < 64 * kChunks; i += 128) {
      const int r = warpgroup * 64 + i / kChunks, chunk = i % kChunks;
      const uint4 value =
          *reinterpret_cast<const uint4*>(smem_ptr + tile + (chunk / 8) * kBlockKV * 128 + r * 128 +
                                          (((chunk % 8) ^ (r & 7)) << 4));
      if (task.kv0 + r < task.kv_slot_end && chunk * 8 < args.params.fwd.head_dim) {
        *reinterpret_cast<uint4*>(base + 2 * ((task.kv_row0 + task.kv0 + r) * stride.row) +
                                  chunk * 16) = value;
      }
    }
  }

  __device__ void run(const BwdTask<Tile>& task) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) dk[i] = dv[i] = 0.0f;

    if (task.num_steps() > 0) accumulate(task);
    ptx::named_barrier_sync(kKvDone, 256);
    const BwdParams& p = args.params;
    if (p.dv) store_out(dv, Smem::kV, 1.0f, p.dv, p.dv_stride, task);
    if (p.dk) store_out(dk, Smem::kK, p.fwd.softmax_scale, p.dk, p.dk_stride, task);
  }
};

// One thread: K and V.
template <class Tile>
__device__ __forceinline__ void bwd_load_kv(const BwdMaps& maps, const BwdTask<Tile>& task,
                                            uint32_t smem) {
  using Smem = BwdSmem<Tile>;
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const uint32_t k_bar = task.kv_has_tail() ? bars.tail_k() : bars.kv_full();
  const uint32_t v_bar = task.kv_has_tail() ? bars.tail_v() : bars.kv_full();
  ptx::mbarrier_arrive_expect_tx(k_bar, Smem::kKvBytes);
  ptx::mbarrier_arrive_expect_tx(v_bar, Smem::kKvBytes);
#pragma unroll
  for (int p = 0; p < Tile::kHeadDim / 64; ++p) {
    const int offset = p * Tile::kBlockKV * 128, row = task.kv_row0 + task.kv0;
    ptx::tma_load_4d(smem + Smem::kK + offset, &maps.k, k_bar, p * 64, row, task.kv_head,
                     task.kv_batch, ptx::kEvictFirst);
    ptx::tma_load_4d(smem + Smem::kV + offset, &maps.v, v_bar, p * 64, row, task.kv_head,
                     task.kv_batch, ptx::kEvictFirst);
  }
}

// One thread: a block of Q or dO as an operand tile, and lse2 or -delta of its rows.
template <class Tile>
__device__ __forceinline__ void bwd_load_rows(const CUtensorMap& map, const float* row_values,
                                              uint32_t tile, uint32_t values, uint32_t bar, int row,
                                              int head, int batch) {
  using Smem = BwdSmem<Tile>;
  ptx::mbarrier_arrive_expect_tx(bar, Smem::kQBytes + Smem::kRowBytes);
#pragma unroll
  for (int p = 0; p < Tile::kHeadDim / 64; ++p) {
    ptx::tma_load_4d(tile + p * Tile::kBlockQ * 128, &map, bar, p * 64, row, head, batch,
                     ptx::kEvictLast);
  }
  ptx::bulk_load(values, row_values, Smem::kRowBytes, bar);
}

// Warp 0 of the first warpgroup, one thread: Q, dO, lse2 and delta of every step.
template <class Tile>
__device__ __forceinline__ void bwd_load(const BwdArgs& args, const BwdMaps& maps,
                                         const BwdTask<Tile>& task, uint32_t smem) {
  using Smem = BwdSmem<Tile>;
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const int q_row0 = task.q_row0, batch = task.q_batch, head0 = task.first_q_head();
  const int base = task.row_block_base, tail_q0 = task.first_tail_q0();
  ptx::griddep_wait();  // lse2 and delta come from the pre-pass
#pragma unroll 1
  for (BwdSteps<Tile> at(task); at.left > 0; at.next()) {
    const int head = head0 + at.group, q0 = at.q_block * Tile::kBlockQ, stage = at.stage;
    const int64_t work_row = (head * args.work.row_blocks + base + at.q_block) * Tile::kBlockQ;
    const bool tail = q0 >= tail_q0;
    ptx::mbarrier_wait(bars.q_empty(stage), at.phase ^ 1);  // the buffers start empty
    bwd_load_rows<Tile>(maps.q, args.work.lse2 + work_row, smem + Smem::kQ + stage * Smem::kQBytes,
                        smem + Smem::kLse + stage * Smem::kRowBytes,
                        tail ? bars.tail_q(stage) : bars.q_full(stage), q_row0 + q0, head, batch);
    ptx::mbarrier_wait(bars.dout_empty(stage), at.phase ^ 1);
    bwd_load_rows<Tile>(
        maps.dout, args.work.delta + work_row, smem + Smem::kDout + stage * Smem::kQBytes,
        smem + Smem::kDelta + stage * Smem::kRowBytes,
        tail ? bars.tail_dout(stage) : bars.dout_full(stage), q_row0 + q0, head, batch);
  }
}

// Warp 3: zeroes the rows behind a sequence, which may hold anything, before the consumers look.
template <class Tile>
__device__ __forceinline__ void bwd_zero_tails(const BwdTask<Tile>& task, uint32_t smem,
                                               uint8_t* smem_ptr) {
  using Smem = BwdSmem<Tile>;
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const int lane = threadIdx.x % 32;
  auto hand_on = [&](uint32_t bar) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(bar);
  };
  if (task.kv_has_tail()) {
    const int valid = task.mask.seqlen_kv - task.kv0;
    ptx::mbarrier_wait(bars.tail_k(), 0);
    zero_tail_rows<Tile::kBlockKV, Tile::kHeadDim, 32>(smem_ptr + Smem::kK, valid, lane);
    hand_on(bars.kv_full());
    ptx::mbarrier_wait(bars.tail_v(), 0);
    zero_tail_rows<Tile::kBlockKV, Tile::kHeadDim, 32>(smem_ptr + Smem::kV, valid, lane);
    hand_on(bars.kv_full());
  }
  uint32_t phases = 0;  // a bit a stage
  const int tail_q0 = task.first_tail_q0(), seqlen_q = task.mask.seqlen_q;
#pragma unroll 1
  for (BwdSteps<Tile> at(task); at.left > 0; at.next()) {
    const int stage = at.stage, q0 = at.q_block * Tile::kBlockQ;
    if (q0 < tail_q0) continue;
    ptx::mbarrier_wait(bars.tail_q(stage), phases >> stage & 1);
    zero_tail_rows<Tile::kBlockQ, Tile::kHeadDim, 32>(smem_ptr + Smem::kQ + stage * Smem::kQBytes,
                                                      seqlen_q - q0, lane);
    hand_on(bars.q_full(stage));
    ptx::mbarrier_wait(bars.tail_dout(stage), phases >> stage & 1);
    zero_tail_rows<Tile::kBlockQ, Tile::kHeadDim, 32>(
        smem_ptr + Smem::kDout + stage * Smem::kQBytes, seqlen_q - q0, lane);
    hand_on(bars.dout_full(stage));
    phases ^= 1u << stage;
  }
}

// Warps 1 and 2: each adds its warpgroup's half of every dQ block to the workspace.
template <class Tile>
__device__ __forceinline__ void bwd_reduce_dq(const BwdArgs& args, const BwdTask<Tile>& task,
                                              uint32_t smem, int half) {
  using Smem = BwdSmem<Tile>;
  constexpr int kHalf = Tile::kBlockQ * Tile::kHeadDim / 2;  // floats
  const bool leader = threadIdx.x % 32 == 0;
  const uint32_t staging = smem + Smem::kDq + half * (Smem::kDqBytes / 2);
  const int head0 = task.first_q_head(), base = task.row_block_base;
  ptx::griddep_wait();  // the pre-pass zeroes the sums
  ptx::named_barrier_arrive(kDqEmpty + half, 160);
#pragma unroll 1
  for (BwdSteps<Tile> at(task); at.left > 0; at.next()) {
    ptx::named_barrier_sync(kDqFull + half, 160);
    if (leader) {
      const int64_t part =
          2 * ((head0 + at.group) * args.work.row_blocks + base + at.q_block) + half;
      if (args.work.dq_turn) wait_for_turn(args.work.dq_turn + part, task.turn(at.q_block));
      ptx::bulk_reduce_add_f32(args.work.dq + part * kHalf, staging, kHalf * 4, ptx::kEvictLast);
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read<0>();
    }
    __syncwarp();
    // The consumers need not wait until the sums have arrived.
    if (at.left > 1) ptx::named_barrier_arrive(kDqEmpty + half, 160);
    if (leader && args.work.dq_turn) {
      const int64_t part =
          2 * ((head0 + at.group) * args.work.row_blocks + base + at.q_block) + half;
      ptx::bulk_wait_group<0>();
      pass_turn(args.work.dq_turn + part, task.turn(at.q_block));
    }
  }
}

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdMaps maps, const __grid_constant__ BwdArgs args) {
  using Smem = BwdSmem<Tile>;
  extern __shared__ __align__(1024) uint8_t smem_ptr[];
  const uint32_t smem = ptx::smem_addr(smem_ptr);
  BwdTask<Tile>& task = *reinterpret_cast<BwdTask<Tile>*>(smem_ptr + Smem::kTask);
  if (threadIdx.x == 0) {
    task = bwd_task<Tile>(args, blockIdx.x);
    BwdBarriers<Tile>{smem + Smem::kBarriers}.init();
    ptx::fence_mbarrier_init();
    if (task.num_steps() > 0) bwd_load_kv<Tile>(maps, task, smem);
  }
  __syncthreads();
  if (task.kv0 >= task.kv_slot_end) return;  // a spare block of a packed batch

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (task.num_steps() > 0) {
      if (warp == 0) {
        if (threadIdx.x == 0) bwd_load<Tile>(args, maps, task, smem);
      } else if (warp <= 2) {
        bwd_reduce_dq<Tile>(args, task, smem, warp - 1);
      } else {
        bwd_zero_tails<Tile>(task, smem, smem_ptr);
      }
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    BwdConsumer<Tile, kDType> consumer{args, smem, smem_ptr, warpgroup - 1,
                                       static_cast<int>(threadIdx.x % 128)};
    consumer.run(task);
  }
}

}  // namespace flash_cuda::sm90
