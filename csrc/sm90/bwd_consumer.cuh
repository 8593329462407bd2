// The warpgroups that compute: 64 keys and one half of dQ each.
#pragma once

#include "ptx/convert.h"
#include "ptx/fence.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/red.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/bwd_convert.cuh"
#include "sm90/bwd_scores.cuh"

namespace flash_cuda::sm90 {

template <class Tile, DType kDType, bool kGeneral>
struct BwdConsumer : BwdScores<Tile, kDType, kGeneral> {
  using Base = BwdScores<Tile, kDType, kGeneral>;
  using Base::add_bias_tile;
  using Base::args;
  using Base::bias_gradient;
  using Base::biased_gradients;
  using Base::capped_probabilities;
  using Base::dp;
  using Base::ds16;
  using Base::kBias;
  using Base::kBlockQ;
  using Base::kScores;
  using Base::kSlices;
  using Base::lane;
  using Base::lse_of_column;
  using Base::maps;
  using Base::mask_scores;
  using Base::modify_scores;
  using Base::p16;
  using Base::pack_probabilities;
  using Base::pin_operand;
  using Base::preset_dp;
  using Base::probabilities;
  using Base::score_gradients;
  using Base::scores;
  using Base::smem;
  using Base::smem_ptr;
  using Base::thread;
  using Base::uniform;
  using Base::warp;
  using Base::warpgroup;

  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  static constexpr int kHeadDim = Tile::kHeadDim, kBlockKV = Tile::kBlockKV;
  // With a bias and a cap, head dim 128, there is no room for dP^T beside the scores.
  static constexpr bool kLateDp = kBias && kGeneral && kHeadDim > 64;
  static constexpr int kOut = kHeadDim / 2;  // dK and dV accumulators a thread
  static constexpr bool kSplitDqRows = Tile::kSplitDqRows, kDqInTurns = Tile::kDqInTurns;
  static constexpr int kDqCols = kSplitDqRows || kDqInTurns ? kHeadDim : kHeadDim / 2;
  using Smem = BwdSmem<Tile>;

  // Descriptors: K-major operands, and MN-major ones with their panel distance.
  static constexpr uint64_t kDescK = ptx::wgmma_desc_base(16, 1024, ptx::kDescSwizzle128);
  static constexpr uint64_t kDescQ =
      ptx::wgmma_desc_base(kBlockQ * 128, 1024, ptx::kDescSwizzle128);
  static constexpr uint64_t kDescKv =
      ptx::wgmma_desc_base(kBlockKV * 128, 1024, ptx::kDescSwizzle128);

  float dk[kOut], dv[kOut];
  uint32_t k_tile;  // offset of the task's K in shared memory

  // acc = A B^T over head_dim, A: 64 keys of this warpgroup, B: kBlockQ rows. `fresh`: from zero.
  template <bool kFresh>
  __device__ void gemm_scores(float (&acc)[kScores], uint32_t a_tile, uint32_t b_tile) {
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

  // acc += A B over the kBlockQ rows, or the slices of 16 in [kFrom, kTo) of them. A from registers
  // (P^T or dS^T), B: dO or Q as [row][column].
  template <int kFrom = 0, int kTo = kSlices>
  __device__ void gemm_out(float (&acc)[kOut], const uint32_t (&a)[kSlices][4], uint32_t b_tile) {
    const uint64_t b = ptx::wgmma_desc(b_tile, kDescQ);
#pragma unroll
    for (int k = kFrom; k < kTo; ++k) {
      ptx::Wgmma<kHeadDim>::template rs<kBf16, 1>(acc, a[k], b + k * 128);
    }
  }

  // dQ = dS K over the keys of both warpgroups, this warpgroup's part of it.
  __device__ void gemm_dq(float (&dq)[kDqCols / 2], int stage) {
    const uint32_t ds = smem + Smem::kDs + stage * Smem::kDsBytes;
    const uint64_t a =
        ptx::wgmma_desc(ds + (kSplitDqRows ? warpgroup * kBlockKV * 128 : 0), kDescKv);
    // Half the columns: the second panel, or the second half of the only one.
    constexpr int kHalf = kDqCols == kHeadDim ? 0 : kHeadDim == 128 ? kBlockKV * 128 : kDqCols * 2;
    const uint64_t b = ptx::wgmma_desc(smem + k_tile + warpgroup * kHalf, kDescKv);
#pragma unroll
    for (int k = 0; k < kBlockKV / 16; ++k) {
      if (k == 0) {
        ptx::Wgmma<kDqCols>::template ss_zero<kBf16, 1, 1>(dq, a, b);
      } else {
        ptx::Wgmma<kDqCols>::template ss<kBf16, 1, 1>(dq, a + k * 128, b + k * 128);
      }
    }
  }

  // dS as [key][row], rows contiguous, in panels of 64 rows.
  template <int kFrom = 0, int kTo = kSlices>
  __device__ void store_ds(int stage) {
    const int key = warpgroup * 64 + warp() * 16 + lane() % 16;
    const uint32_t base = smem + Smem::kDs + stage * Smem::kDsBytes + key * 128;
#pragma unroll
    for (int c = kFrom; c < kTo; ++c) {
      const int chunk = (c % 4) * 2 + lane() / 16;
      ptx::stmatrix_x4(base + (c / 4) * kBlockKV * 128 + ((chunk ^ (key & 7)) << 4), ds16[c]);
    }
  }

  // The staging buffer is filled together with the other warpgroup, and emptied by the store warps
  // in turns. A task fills it once a step and twice at the end, so that the stage of Q tells whose
  // turn it is.
  __device__ void wait_out_empty() const { ptx::named_barrier_sync(kOutEmpty + warpgroup, 160); }
  __device__ void hand_out(int stage) const {
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_arrive(kOutFull + (kDqInTurns ? warpgroup : stage), kDqInTurns ? 160 : 288);
  }

  // Hands dQ to a store warp: 16 bytes a thread and column group, in accumulator order.
  __device__ void stage_dq(const float (&dq)[kDqCols / 2], int stage) {
    wait_out_empty();
    float4* staging =
        reinterpret_cast<float4*>(smem_ptr + Smem::kOut + warpgroup * Smem::kOutBytes);
#pragma unroll
    for (int i = 0; i < kDqCols / 8; ++i) {
      staging[i * 128 + thread] =
          make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    hand_out(stage);
  }

  // Adds slices of P^T dO to dV.
  template <int kFrom, int kTo>
  __device__ void issue_dv(uint32_t dout_tile) {
    if constexpr (kFrom == 0) ptx::pin(dv);
    pin_operand(p16);
    ptx::wgmma_fence();
    gemm_out<kFrom, kTo>(dv, p16, dout_tile);
  }

  __device__ void issue_dp(int stage) {
    gemm_scores<false>(dp, Smem::kV, smem + Smem::kDout + stage * Smem::kQBytes);
    ptx::wgmma_commit_group();
  }

  // From S^T, with dP^T still running, to dS and dV, in the order that measured best for the tile.
  __device__ void gradients(const BwdBias<Tile, kDType>& bias, int stage, uint32_t phase,
                            const float2* lse) {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    const uint32_t q_tile = smem + Smem::kQ + stage * Smem::kQBytes;
    const uint32_t dout_tile = smem + Smem::kDout + stage * Smem::kQBytes;
    constexpr int kHalf = kSlices / 2;
    if constexpr (kBias || kGeneral) {
      if constexpr (kBias && kGeneral) {
        capped_probabilities(bias, stage, lse);
        if constexpr (kLateDp) {
          preset_dp(stage);
          ptx::wgmma_fence();
          issue_dp(stage);
        }
      } else {
        probabilities(args.scale_log2, stage, lse);
      }
      ptx::wgmma_wait_group<0>();
      ptx::pin(dp);
      if constexpr (kBias) {
        biased_gradients(bias);
      } else {
        bias_gradient(bias.task, bias.q0, bias.group);
        score_gradients();
      }
      store_ds(stage);
      issue_dv<0, kSlices>(dout_tile);
    } else if constexpr (Tile::kDkInHalves) {
      // The second half of the exponentials runs beside the first half of dV and dK.
      Base::template probabilities<0, kHalf>(args.scale_log2, stage, lse);
      // Passed long since: a branch, over which the compiler does not put the exponentials off.
      ptx::mbarrier_wait(bars.q_full(stage), phase);
      ptx::wgmma_wait_group<0>();
      ptx::pin(dp);
      Base::template score_gradients<0, kHalf>();
      store_ds<0, kHalf>(stage);
      Base::template pack_probabilities<0, kHalf>();
      issue_dv<0, kHalf>(dout_tile);
      ptx::pin(dk);
      gemm_out<0, kHalf>(dk, ds16, q_tile);
      ptx::wgmma_commit_group();
      Base::template probabilities<kHalf, kSlices>(args.scale_log2, stage, lse);
      Base::template score_gradients<kHalf, kSlices>();
      store_ds<kHalf, kSlices>(stage);
      Base::template pack_probabilities<kHalf, kSlices>();
      issue_dv<kHalf, kSlices>(dout_tile);
    } else {
      // The first half of dV is issued before dP^T is waited for.
      Base::template probabilities<0, kHalf>(args.scale_log2, stage, lse);
      Base::template pack_probabilities<0, kHalf>();
      issue_dv<0, kHalf>(dout_tile);
      ptx::wgmma_commit_group();
      Base::template probabilities<kHalf, kSlices>(args.scale_log2, stage, lse);
      Base::template pack_probabilities<kHalf, kSlices>();
      ptx::wgmma_wait_group<1>();
      ptx::pin(dp);
      score_gradients();
      store_ds(stage);
      issue_dv<kHalf, kSlices>(dout_tile);
    }
    ptx::wgmma_commit_group();
  }

  __device__ void leave_stage(uint32_t empty) const {
    if constexpr (BwdBarriers<Tile>::kWarpsLeave) {
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(empty);
    } else {
      ptx::mbarrier_arrive(empty);
    }
  }

  // After dS and the issue of dV: dK, and before it dQ, if that is this warpgroup's.
  template <bool kMyDq>
  __device__ void add_dk(const BwdBias<Tile, kDType>& bias, int stage) {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    float dq[kMyDq ? kDqCols / 2 : 1];
    // dS is whole; dS(i-1) in the other buffer is done with.
    if constexpr (!kDqInTurns) {
      ptx::named_barrier_sync(kDsReady, 256);
    } else if constexpr (kMyDq) {
      ptx::named_barrier_sync(kDsInTurns + stage, 256);
    } else {
      ptx::named_barrier_arrive(kDsInTurns + stage, 256);
    }
    if constexpr (kMyDq) {
      ptx::wgmma_fence();
      gemm_dq(dq, stage);
      ptx::wgmma_commit_group();
    }
    ptx::wgmma_wait_group<kMyDq>();  // dV has taken dO
    ptx::pin(dv);
    pin_operand(p16);
    leave_stage(bars.dout_empty(stage));
    if constexpr (kBias) bias.hand_back();
    ptx::pin(dk);
    pin_operand(ds16);
    ptx::wgmma_fence();
    gemm_out<!kGeneral && Tile::kDkInHalves ? kSlices / 2 : 0, kSlices>(
        dk, ds16, smem + Smem::kQ + stage * Smem::kQBytes);
    ptx::wgmma_commit_group();
    if constexpr (kMyDq) {
      ptx::wgmma_wait_group<1>();
      ptx::pin(dq);
      stage_dq(dq, stage);
    }
    ptx::wgmma_wait_group<0>();  // dK has taken Q
    ptx::pin(dk);
    pin_operand(ds16);
    leave_stage(bars.q_empty(stage));
  }

  // One block of Q and dO in `stage`, whose barriers are in phase `phase`.
  __device__ void step(const BwdTask<Tile>& task, int group, int q0, bool masked, int stage,
                       uint32_t phase) {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    const uint32_t q_tile = smem + Smem::kQ + stage * Smem::kQBytes;
    float2 lse[Tile::kLseInRegisters ? kScores / 4 : 1];
    const BwdBias<Tile, kDType> bias{args, smem,  warpgroup, thread,
                                     task, group, q0,        {stage, phase}};

    ptx::mbarrier_wait(bars.q_full(stage), phase);
    if constexpr (Tile::kLseInRegisters) {
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) lse[j] = lse_of_column(stage, j);
    }
    ptx::mbarrier_wait(bars.dout_full(stage), phase);
    if constexpr (!kLateDp) preset_dp(stage);
    ptx::wgmma_fence();
    gemm_scores<true>(scores, k_tile, q_tile);
    ptx::wgmma_commit_group();
    if constexpr (!kLateDp) issue_dp(stage);

    ptx::wgmma_wait_group<kLateDp ? 0 : 1>();
    ptx::pin(scores);
    if constexpr (kGeneral) modify_scores(task, q0, group);
    if constexpr (kBias && !kGeneral) add_bias_tile(bias);
    if (masked) {
      mask_scores(task.mask, q0, task.kv0);
      __syncwarp();
    }
    gradients(bias, stage, phase, lse);
    ptx::fence_proxy_async_shared();
    if (!kDqInTurns || warpgroup == stage) {
      add_dk<true>(bias, stage);
    } else {
      add_dk<false>(bias, stage);
    }
  }

  // The loop's own values stay in registers: a read of the task in it would wait behind the GEMMs.
  __device__ void accumulate(const BwdTask<Tile>& task, RingPlace& ring) {
    const int full_begin = task.blocks.full_begin, full_end = task.blocks.full_end;
#pragma unroll 1
    for (BwdSteps at(task); at.left > 0; at.next()) {
      const bool masked = at.q_block < full_begin || at.q_block >= full_end;
      step(task, at.group, at.q_block * kBlockQ, masked, uniform(ring.slot), ring.phase);
      ring.next();
    }
  }

  // 64 rows of dK or dV to shared memory, in panels of 64 columns.
  __device__ void stage_rows(float (&acc)[kOut], float scale, uint32_t to) {
    static_assert(64 * Tile::kPanels * 128 <= Smem::kOutBytes);
    const int row = warp() * 16 + lane() % 16;
    const uint32_t base = to + row * 128;
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c) {
      const int chunk = (c % 4) * 2 + lane() / 16;
      const float* a = acc + 8 * c;
      ptx::stmatrix_x4(base + (c / 4) * 64 * 128 + ((chunk ^ (row & 7)) << 4),
                       {ptx::pack<kDType>(a[0] * scale, a[1] * scale),
                        ptx::pack<kDType>(a[2] * scale, a[3] * scale),
                        ptx::pack<kDType>(a[4] * scale, a[5] * scale),
                        ptx::pack<kDType>(a[6] * scale, a[7] * scale)});
    }
  }
  __device__ void stage_out(float (&acc)[kOut], float scale, int stage) {
    wait_out_empty();
    stage_rows(acc, scale, smem + Smem::kOut + warpgroup * Smem::kOutBytes);
    hand_out(stage);
  }
  // dV to the place of K, whose last reader here was dQ: at head dim 128 a warpgroup's half of the
  // columns, which are the panel that it writes; at 64 all of K.
  __device__ void stage_dv_in_k(int buffer) {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    if (kSplitDqRows) ptx::named_barrier_sync(kDsReady, 256);
    stage_rows(dv, 1.0f, smem + k_tile + warpgroup * (Smem::kKvBytes / 2));
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(bars.dv_full(buffer));
  }

  // A piece of a shared task leaves dK and dV in the workspace. Who is done last adds the pieces of
  // the task in their order, whoever that is, and stores the sums.
  __device__ void join_pieces(BwdTask<Tile>& task) {
    constexpr int kQuads = kOut / 4, kThreads = 128 * Tile::kConsumerWarpgroups;
    float4* const mine = reinterpret_cast<float4*>(args.work.pieces) + warpgroup * 128 + thread;
    const auto at = [&](int slot, int i) {
      return mine + (int64_t(slot) * 2 * kQuads + i) * kThreads;
    };
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      *at(task.slot, i) = make_float4(dv[4 * i], dv[4 * i + 1], dv[4 * i + 2], dv[4 * i + 3]);
      *at(task.slot, i + kQuads) =
          make_float4(dk[4 * i], dk[4 * i + 1], dk[4 * i + 2], dk[4 * i + 3]);
    }
    ptx::named_barrier_sync(kDsReady, kThreads);
    if (warpgroup == 0 && thread == 0) {
      const int before =
          ptx::add_acq_rel(args.work.pieces_done + BwdWorkspace::kJoins * task.shared, 1);
      task.stores[0] = before == task.pieces - 1;
    }
    ptx::named_barrier_sync(kDsReady, kThreads);
    if (!task.stores[0]) return;
    const int first = BwdShares::slot(args.shares.first_share(task.shared), task.shared);
#pragma unroll
    for (int i = 0; i < kOut; ++i) dk[i] = dv[i] = 0.0f;
#pragma unroll 1
    for (int piece = 0; piece < task.pieces; ++piece) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        add_quad(dv + 4 * i, __ldcg(at(first + piece, i)));
        add_quad(dk + 4 * i, __ldcg(at(first + piece, i + kQuads)));
      }
    }
  }
  __device__ static void add_quad(float* sum, float4 v) {
    sum[0] += v.x;
    sum[1] += v.y;
    sum[2] += v.z;
    sum[3] += v.w;
  }

  __device__ void run() {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    RingPlace tasks, rows;
    KeyPlace<Tile> keys;
    uint32_t v_phase = 0;
    for (;; tasks.next()) {
      ptx::mbarrier_wait(bars.task_full(tasks.slot), tasks.phase);
      BwdTask<Tile>& task = bwd_task_at<Tile>(smem_ptr, tasks.slot);
      if (task.none) break;
      if constexpr (kConverts<Tile, kGeneral>) {
        if (task.convert) {
          bwd_convert<Tile, kDType>(args, task, smem, smem_ptr, warpgroup, thread, rows);
          ptx::mbarrier_arrive(bars.task_empty(tasks.slot));
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < kOut; ++i) dk[i] = dv[i] = 0.0f;
      const bool any = task.num_steps() > 0;
      const int buffer = uniform(keys.slot());
      if (any) {
        k_tile = Smem::kK + buffer * Smem::kKvBytes;
        ptx::mbarrier_wait(bars.k_full(buffer), keys.phase());
        ptx::mbarrier_wait(bars.v_full(), v_phase);
        accumulate(task, rows);
        keys.next();
        v_phase ^= 1;
        if (!Tile::kDvInK) ptx::mbarrier_arrive(bars.k_empty(buffer));
      }
      if constexpr (kShares<Tile, kGeneral>) {
        if (task.pieces > 1) join_pieces(task);
      }
      ptx::mbarrier_arrive(bars.task_empty(tasks.slot));
      if (Tile::kDvInK && any) {
        stage_dv_in_k(buffer);
      } else {
        stage_out(dv, 1.0f, rows.slot);
      }
      stage_out(dk, args.params.fwd.softmax_scale, rows.slot ^ 1);
    }
    wait_out_empty();  // the store warps' last arrival
  }
};

}  // namespace flash_cuda::sm90
