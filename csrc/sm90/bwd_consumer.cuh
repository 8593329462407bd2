// The warpgroups that compute: 64 keys and one half of dQ each.
#pragma once

#include "common/mask.h"
#include "ptx/convert.h"
#include "ptx/fence.h"
#include "ptx/math.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/bwd_bias_tile.cuh"
#include "sm90/bwd_convert.cuh"
#include "sm90/bwd_smem.cuh"

namespace flash_cuda::sm90 {

// kGeneral: with softcap, or with ALiBi and a bias. Where the tile has room for a bias there are
// ALiBi and a bias, and kGeneral means softcap.
template <class Tile, DType kDType, bool kGeneral>
struct BwdConsumer {
  static constexpr bool kBias = Tile::kBiasStages > 0;
  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  static constexpr int kHeadDim = Tile::kHeadDim, kBlockQ = Tile::kBlockQ;
  static constexpr int kBlockKV = Tile::kBlockKV;
  // With a bias and a cap, head dim 128, there is no room for dP^T beside the scores.
  static constexpr bool kLateDp = kBias && kGeneral && kHeadDim > 64;
  static constexpr int kScores = kBlockQ / 2;   // S^T and dP^T accumulators a thread
  static constexpr int kOut = kHeadDim / 2;     // dK and dV accumulators a thread
  static constexpr int kSlices = kBlockQ / 16;  // k-steps of dV and dK
  static constexpr bool kSplitDqRows = Tile::kSplitDqRows, kDqInTurns = Tile::kDqInTurns;
  static constexpr int kDqCols = kSplitDqRows || kDqInTurns ? kHeadDim : kHeadDim / 2;
  using Smem = BwdSmem<Tile>;

  // Descriptors: K-major operands, and MN-major ones with their panel distance.
  static constexpr uint64_t kDescK = ptx::wgmma_desc_base(16, 1024, ptx::kDescSwizzle128);
  static constexpr uint64_t kDescQ =
      ptx::wgmma_desc_base(kBlockQ * 128, 1024, ptx::kDescSwizzle128);
  static constexpr uint64_t kDescKv =
      ptx::wgmma_desc_base(kBlockKV * 128, 1024, ptx::kDescSwizzle128);

  const BwdArgs& args;
  const BwdMaps& maps;
  const uint32_t smem;
  uint8_t* const smem_ptr;
  const int warpgroup, thread;  // 0 or 1; in the warpgroup

  float dk[kOut], dv[kOut], scores[kScores], dp[kScores];
  uint32_t p16[kSlices][4],
      ds16[kSlices][4];         // A operands, one row a k-step
  uint32_t slopes[kSlices][4];  // with a bias and a cap: derivatives of tanh, float16

  __device__ static void pin_operand(uint32_t (&a)[kSlices][4]) {
#pragma unroll
    for (int k = 0; k < kSlices; ++k) ptx::pin(a[k]);
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
    const uint64_t b = ptx::wgmma_desc(smem + Smem::kK + warpgroup * kHalf, kDescKv);
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

  // tanh with an absolute error of about 1e-7, in two approximate instructions.
  __device__ static float tanh_of(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + ptx::ex2(x * 2.8853900817779268f));
  }

  // General variant: products to scores, see BwdArgs.
  __device__ void modify_scores(const BwdTask<Tile>& task, int q0, int group) {
    const FwdParams& p = args.params.fwd;
    if (p.softcap != 0.0f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = tanh_of(scores[i] * args.to_score);
      return;
    }
    const int q = q0 + 2 * (lane() % 4), key = task.kv0 + key_row();
    const int head = task.first_q_head() + group;
    if (p.alibi_slopes) {
      const float slope = p.alibi_slopes[task.sequence * p.alibi_batch_stride + head];
      const int distance = q + task.mask.offset - key;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float away = fabsf(static_cast<float>(distance + 8 * j + e % 2 - 8 * (e / 2)));
          scores[4 * j + e] = fmaf(-slope, away, scores[4 * j + e] * args.to_score);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] *= args.to_score;
    }
    if (p.bias) sm90::add_bias<kDType>(scores, p, task.mask, task.sequence, head, q, key);
  }

  // With a tile of bias and no cap: products to scores.
  __device__ void add_bias_tile(const BwdBias<Tile, kDType>& bias) {
    bias.for_each([&](int j, const float (&b)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[4 * j + e] = fmaf(scores[4 * j + e], args.to_score, b[e]);
    });
    if (!args.params.fwd.alibi_slopes) return;
    const float slope = bias.part().slope();
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = fmaf(-slope, bias.part().away(i), scores[i]);
  }

  // With a bias and a cap, of the tanhs: P^T, to p16, and the derivative of tanh.
  __device__ void capped_probabilities(const BwdBias<Tile, kDType>& bias, int stage,
                                       const float2* lse) {
    constexpr float kLog2E = 1.4426950408889634f;
    const float slope = args.params.fwd.alibi_slopes ? bias.part().slope() * kLog2E : 0.0f;
    bias.for_each([&](int j, const float (&b)[4]) {
      const float2 row = Tile::kLseInRegisters ? lse[j] : lse_of_column(stage, j);
      float* s = scores + 4 * j;
      float probability[4], slope_of[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float add =
            fmaf(b[e], kLog2E, fmaf(-slope, bias.part().away(4 * j + e), e % 2 ? -row.y : -row.x));
        probability[e] = ptx::ex2(fmaf(s[e], args.scale_log2, add));
        // A masked score is -inf and has no slope to tell from.
        const float tanh = fmaxf(s[e], -1.0f);
        slope_of[e] = fmaf(-tanh, tanh, 1.0f);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p16[j / 2][j % 2 * 2 + r] = ptx::pack<kDType>(probability[2 * r], probability[2 * r + 1]);
        slopes[j / 2][j % 2 * 2 + r] =
            ptx::pack<DType::kFloat16>(slope_of[2 * r], slope_of[2 * r + 1]);
      }
    });
  }

  // P^T = exp2(S^T * scale_log2 - lse2) of some slices. With a cap the derivative of tanh then
  // joins it, where only dS^T takes it from, so the operand for dV is made before.
  template <int kFrom = 0, int kTo = kSlices>
  __device__ void probabilities(float scale_log2, int stage, const float2* lse) {
    const float capped = !kBias && args.params.fwd.softcap != 0.0f ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 2 * kFrom; j < 2 * kTo; ++j) {
      const float2 l = Tile::kLseInRegisters ? lse[j] : lse_of_column(stage, j);
      float* s = scores + 4 * j;
      // A masked score is -inf and has no slope to tell from.
      const float tanhs[4] = {fmaxf(s[0], -1.0f), fmaxf(s[1], -1.0f), fmaxf(s[2], -1.0f),
                              fmaxf(s[3], -1.0f)};
      s[0] = ptx::ex2(fmaf(s[0], scale_log2, -l.x));
      s[1] = ptx::ex2(fmaf(s[1], scale_log2, -l.y));
      s[2] = ptx::ex2(fmaf(s[2], scale_log2, -l.x));
      s[3] = ptx::ex2(fmaf(s[3], scale_log2, -l.y));
      if constexpr (kBias) {
        pack_probabilities(j);
      } else if constexpr (kGeneral) {
        pack_probabilities(j);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] *= fmaf(-capped * tanhs[e], tanhs[e], 1.0f);
      }
    }
  }

  __device__ void pack_probabilities(int j) {
    const float* s = scores + 4 * j;
    p16[j / 2][j % 2 * 2] = ptx::pack<kDType>(s[0], s[1]);
    p16[j / 2][j % 2 * 2 + 1] = ptx::pack<kDType>(s[2], s[3]);
  }
  template <int kFrom, int kTo>
  __device__ void pack_probabilities() {
#pragma unroll
    for (int j = 2 * kFrom; j < 2 * kTo; ++j) pack_probabilities(j);
  }

  // General variant: dS^T, not rounded, to the gradient of the bias, and P^T := 1.
  __device__ void bias_gradient(const BwdTask<Tile>& task, int q0, int group) {
    if (!args.params.dbias) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i) dp[i] *= scores[i], scores[i] = 1.0f;
    add_dbias(dp, args.params, q0 / kBlockQ * args.dbias_block_stride, task.mask, task.sequence,
              task.first_q_head() + group, q0 + 2 * (lane() % 4), task.kv0 + key_row());
  }

  // With a tile of bias: dS^T. Before it is rounded, or comes to the cap, it is the gradient of the
  // bias.
  __device__ void biased_gradients(const BwdBias<Tile, kDType>& bias) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float2 probability = kGeneral ? ptx::unpack<kDType>(p16[i / 4][i % 4])
                                          : make_float2(scores[2 * i], scores[2 * i + 1]);
      dp[2 * i] *= probability.x;
      dp[2 * i + 1] *= probability.y;
    }
    bias.write(maps, dp);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      float2 d = {dp[2 * i], dp[2 * i + 1]};
      if constexpr (kGeneral) {
        const float2 slope = ptx::unpack<DType::kFloat16>(slopes[i / 4][i % 4]);
        d = {d.x * slope.x, d.y * slope.y};
      }
      ds16[i / 4][i % 4] = ptx::pack<kDType>(d.x, d.y);
    }
  }

  // dS^T = P^T o dP^T, where dP^T already is less delta.
  template <int kFrom = 0, int kTo = kSlices>
  __device__ void score_gradients() {
#pragma unroll
    for (int j = 4 * kFrom; j < 4 * kTo; ++j) {
      ds16[j / 4][j % 4] =
          ptx::pack<kDType>(scores[2 * j] * dp[2 * j], scores[2 * j + 1] * dp[2 * j + 1]);
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
      probabilities<0, kHalf>(args.scale_log2, stage, lse);
      // Passed long since: a branch, over which the compiler does not put the exponentials off.
      ptx::mbarrier_wait(bars.q_full(stage), phase);
      ptx::wgmma_wait_group<0>();
      ptx::pin(dp);
      score_gradients<0, kHalf>();
      store_ds<0, kHalf>(stage);
      pack_probabilities<0, kHalf>();
      issue_dv<0, kHalf>(dout_tile);
      ptx::pin(dk);
      gemm_out<0, kHalf>(dk, ds16, q_tile);
      ptx::wgmma_commit_group();
      probabilities<kHalf, kSlices>(args.scale_log2, stage, lse);
      score_gradients<kHalf, kSlices>();
      store_ds<kHalf, kSlices>(stage);
      pack_probabilities<kHalf, kSlices>();
      issue_dv<kHalf, kSlices>(dout_tile);
    } else {
      // The first half of dV is issued before dP^T is waited for.
      probabilities<0, kHalf>(args.scale_log2, stage, lse);
      pack_probabilities<0, kHalf>();
      issue_dv<0, kHalf>(dout_tile);
      ptx::wgmma_commit_group();
      probabilities<kHalf, kSlices>(args.scale_log2, stage, lse);
      pack_probabilities<kHalf, kSlices>();
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
    gemm_scores<true>(scores, Smem::kK, q_tile);
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

  // Hands 64 rows of dK or dV to a store warp, in panels of 64 columns.
  __device__ void stage_out(float (&acc)[kOut], float scale, int stage) {
    static_assert(64 * Tile::kPanels * 128 <= Smem::kOutBytes);
    wait_out_empty();
    const int row = warp() * 16 + lane() % 16;
    const uint32_t base = smem + Smem::kOut + warpgroup * Smem::kOutBytes + row * 128;
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
    hand_out(stage);
  }

  __device__ void run() {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    RingPlace tasks, rows;
    uint32_t kv_phase = 0;
    for (;; tasks.next()) {
      ptx::mbarrier_wait(bars.task_full(tasks.slot), tasks.phase);
      const BwdTask<Tile>& task = bwd_task_at<Tile>(smem_ptr, tasks.slot);
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
      if (task.num_steps() > 0) {
        ptx::mbarrier_wait(bars.kv_full(), kv_phase);
        accumulate(task, rows);
        kv_phase ^= 1;
        ptx::mbarrier_arrive(bars.kv_empty());
      }
      ptx::mbarrier_arrive(bars.task_empty(tasks.slot));
      stage_out(dv, 1.0f, rows.slot);
      stage_out(dk, args.params.fwd.softmax_scale, rows.slot ^ 1);
    }
    wait_out_empty();  // the store warps' last arrival
  }
};

}  // namespace flash_cuda::sm90
