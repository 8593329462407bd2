// The two warpgroups that compute, each with its own GEMMs: the first S, P, dV
// and half of this block's columns of dQ, the second dP, dS, dK and the other
// half.
#pragma once

#include "common/mask.h"
#include "ptx/convert.h"
#include "ptx/fence.h"
#include "ptx/math.h"
#include "ptx/named_barrier.h"
#include "ptx/smem_addr.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/bwd_wide_load.cuh"

namespace flash_cuda::sm90 {

// Probabilities are computed times 2^14: as float16 numbers, in which they pass
// from one warpgroup to the other, they then are exact to 2^-11 from 4e-9 up
// to 1.
constexpr float kProbExponent = 14.0f;
constexpr float kProbScale = 1.0f / 16384.0f;

// What both have in common.
template <class Tile, DType kDType, int kWarpgroup>
struct BwdWideWarpgroup {
  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  static constexpr int kScores = Tile::kBlockQ / 2;  // accumulators a thread of a 64 x 64 tile
  static constexpr int kDqCols = Tile::dq_cols(kWarpgroup);
  static constexpr int kDq = kDqCols / 2;  // of 64 rows x its columns of dQ
  using Smem = BwdWideSmem<Tile>;
  static constexpr uint64_t kDesc =
      ptx::wgmma_desc_base(Tile::kPanelBytes, 1024, ptx::kDescSwizzle128);

  const BwdWideArgs& args;
  const BwdTask<Tile>& task;
  const uint32_t smem;
  const uint32_t rank,
      peer;          // peer: of shared memory, added to an address of this block's
  const int thread;  // in the warpgroup

  __device__ int lane() const { return thread & 31; }
  __device__ int warp() const { return thread >> 5; }
  __device__ BwdWideBarriers bars() const { return {smem + Smem::kBarriers}; }
  __device__ uint32_t at_peer(uint32_t addr) const { return addr + peer; }

  // A warp is done with what both blocks share.
  __device__ void release(uint32_t bar) const {
    __syncwarp();
    if (lane() == 0) {
      ptx::mbarrier_arrive(bar);
      ptx::mbarrier_arrive_cluster(at_peer(bar));
    }
  }

  __device__ static void pin_operand(uint32_t (&a)[kScores / 8][4]) {
#pragma unroll
    for (int k = 0; k < kScores / 8; ++k) ptx::pin(a[k]);
  }

  // acc = A B^T over kDim columns, A: the 64 keys, B: 64 rows. kFresh: from
  // zero.
  template <int kDim, bool kFresh>
  __device__ void gemm_scores(float (&acc)[kScores], int a_tile, uint32_t b_tile) const {
    const uint64_t a = ptx::wgmma_desc(smem + a_tile, kDesc), b = ptx::wgmma_desc(b_tile, kDesc);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const int step = (k / 4) * (Tile::kPanelBytes / 16) + (k % 4) * 2;
      if (kFresh && k == 0) {
        ptx::Wgmma<Tile::kBlockQ>::template ss_zero<kBf16, 0, 0>(acc, a + step, b + step);
      } else {
        ptx::Wgmma<Tile::kBlockQ>::template ss<kBf16, 0, 0>(acc, a + step, b + step);
      }
    }
  }

  // acc += A B over the rows of Q or dO, A from registers.
  template <int kDim>
  __device__ void gemm_out(float (&acc)[kDim / 2], const uint32_t (&a)[kScores / 8][4],
                           uint32_t b_tile) const {
    const uint64_t b = ptx::wgmma_desc(b_tile, kDesc);
#pragma unroll
    for (int k = 0; k < Tile::kBlockQ / 16; ++k) {
      ptx::Wgmma<kDim>::template rs<kBf16, 1>(acc, a[k], b + k * 128);
    }
  }

  // dQ = dS K over the keys of both blocks, the columns of this warpgroup.
  __device__ void gemm_dq(float (&dq)[kDq]) const {
    const int col = rank * (Tile::kHeadDim / 2) + bwd_wide_dq_col<Tile, kWarpgroup>(rank);
    const int panel = col / 64, at = col % 64 * 2;
    const uint64_t a = ptx::wgmma_desc(smem + Smem::kDs, kDesc);
    const uint64_t own = ptx::wgmma_desc(smem + Smem::kK + panel * Tile::kPanelBytes + at, kDesc);
    const uint64_t others = ptx::wgmma_desc(
        smem + Smem::kPeerK + (panel - rank * (Tile::kPanels / 2)) * Tile::kPanelBytes + at, kDesc);
    constexpr int kSteps = Tile::kKeys / 16;
#pragma unroll
    for (int k = 0; k < 2 * kSteps; ++k) {
      const uint64_t b = k < kSteps ? own + k * 128 : others + (k - kSteps) * 128;
      if (k == 0) {
        ptx::Wgmma<kDqCols>::template ss_zero<kBf16, 1, 1>(dq, a, b);
      } else {
        ptx::Wgmma<kDqCols>::template ss<kBf16, 1, 1>(dq, a + k * 128, b);
      }
    }
  }

  // Hands dQ to the store warp: 16 bytes a thread and column group, in
  // accumulator order.
  __device__ void stage_dq(const float (&dq)[kDq]) const {
    ptx::named_barrier_sync(kWideEmpty + kWarpgroup, 160);
    const uint32_t staging = smem + Smem::kStaging + kWarpgroup * Smem::kStagingBytes + thread * 16;
#pragma unroll
    for (int i = 0; i < kDq / 4; ++i) {
      ptx::store_shared_16(staging + i * 2048,
                           {__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                            __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])});
    }
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_arrive(kWideFull + kWarpgroup, 160);
  }

  // Hands dK or dV to the store warp, two panels at a time.
  template <int kDim>
  __device__ void stage_out(float (&acc)[kDim / 2], float scale) const {
    const int row = warp() * 16 + lane() % 16;
    const uint32_t base = smem + Smem::kStaging + kWarpgroup * Smem::kStagingBytes + row * 128;
#pragma unroll
    for (int p = 0; p < kDim / 64; p += 2) {
      ptx::named_barrier_sync(kWideEmpty + kWarpgroup, 160);
#pragma unroll
      for (int c = 0; c < 8 && p * 4 + c < kDim / 16; ++c) {
        const int chunk = (c % 4) * 2 + lane() / 16;
        const float* a = acc + 32 * p + 8 * c;
        ptx::stmatrix_x4(base + (c / 4) * Tile::kPanelBytes + ((chunk ^ (row & 7)) << 4),
                         {ptx::pack<kDType>(a[0] * scale, a[1] * scale),
                          ptx::pack<kDType>(a[2] * scale, a[3] * scale),
                          ptx::pack<kDType>(a[4] * scale, a[5] * scale),
                          ptx::pack<kDType>(a[6] * scale, a[7] * scale)});
      }
      ptx::fence_proxy_async_shared();
      ptx::named_barrier_arrive(kWideFull + kWarpgroup, 160);
    }
  }

  // The store warp's last arrival.
  __device__ void finish() const { ptx::named_barrier_sync(kWideEmpty + kWarpgroup, 160); }
  // P and then dS of a warp's 16 keys.
  __device__ uint32_t warp_ds() const { return smem + Smem::kDs + warp() * 2048; }
};

// kGeneral: with softcap or ALiBi.
template <class Tile, DType kDType, bool kGeneral>
struct BwdWideScores : BwdWideWarpgroup<Tile, kDType, 0> {
  using Base = BwdWideWarpgroup<Tile, kDType, 0>;
  using Smem = typename Base::Smem;
  using Base::args, Base::task, Base::smem, Base::rank, Base::thread;
  using Base::bars, Base::lane, Base::warp, Base::kScores, Base::kDq;

  float dv[Tile::kHeadDimV / 2], scores[kScores];
  uint32_t p16[kScores / 8][4];    // A operand of dV, one row a k-step
  uint32_t p_out[kScores / 8][4];  // float16, for dS
  float2 lse[kScores / 4];

  // First of the two keys of this thread; the other is 8 further.
  __device__ int key() const { return task.kv0 + rank * Tile::kKeys + warp() * 16 + lane() / 4; }

  // Columns (queries) outside a key's interval get -inf.
  __device__ void mask_scores(int q0) {
    const int col = q0 + 2 * (lane() % 4);
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int kv = key() + 8 * r;
      begin[r] = task.mask.q_begin(kv) - col;
      end[r] = kv < task.mask.seqlen_kv ? task.mask.q_end(kv) - col : begin[r];
    }
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int q = 8 * j + e % 2;
        if (q < begin[e / 2] || q >= end[e / 2]) scores[4 * j + e] = args.base.masked_score;
      }
    }
  }

  // tanh with an absolute error of about 1e-7, in two approximate instructions.
  __device__ static float tanh_of(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + ptx::ex2(x * 2.8853900817779268f));
  }

  // General variant: products to scores, see BwdArgs.
  __device__ void modify_scores(int q0, int group) {
    const FwdParams& p = args.base.params.fwd;
    if (p.softcap != 0.0f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = tanh_of(scores[i] * args.base.to_score);
      return;
    }
    const float slope =
        p.alibi_slopes[task.sequence * p.alibi_batch_stride + task.first_q_head() + group];
    const int distance = q0 + 2 * (lane() % 4) + task.mask.offset - key();
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float away = fabsf(static_cast<float>(distance + 8 * j + e % 2 - 8 * (e / 2)));
        scores[4 * j + e] = fmaf(-slope, away, scores[4 * j + e] * args.base.to_score);
      }
    }
  }

  // P^T = exp2(S^T * scale_log2 - lse2), twice in 16 bits: for dV, and as
  // float16 for dS. With a cap the derivative of tanh joins the latter.
  __device__ void probabilities() {
    const float scale = args.base.scale_log2;
    const float capped = kGeneral && args.base.params.fwd.softcap != 0.0f ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      float* s = scores + 4 * j;
      // A masked score is -inf and has no slope to tell from.
      const float tanhs[4] = {fmaxf(s[0], -1.0f), fmaxf(s[1], -1.0f), fmaxf(s[2], -1.0f),
                              fmaxf(s[3], -1.0f)};
      s[0] = ptx::ex2(fmaf(s[0], scale, -lse[j].x));
      s[1] = ptx::ex2(fmaf(s[1], scale, -lse[j].y));
      s[2] = ptx::ex2(fmaf(s[2], scale, -lse[j].x));
      s[3] = ptx::ex2(fmaf(s[3], scale, -lse[j].y));
      p16[j / 2][j % 2 * 2] = ptx::pack<kDType>(s[0], s[1]);
      p16[j / 2][j % 2 * 2 + 1] = ptx::pack<kDType>(s[2], s[3]);
      if constexpr (kGeneral) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] *= fmaf(-capped * tanhs[e], tanhs[e], 1.0f);
      }
      p_out[j / 2][j % 2 * 2] = ptx::pack<DType::kFloat16>(s[0], s[1]);
      p_out[j / 2][j % 2 * 2 + 1] = ptx::pack<DType::kFloat16>(s[2], s[3]);
    }
  }

  __device__ void issue_scores(int step) {
    const RingStep<Tile::kQStages> q(step);
    ptx::mbarrier_wait(bars().q_full(q.stage), q.phase);
    ptx::wgmma_fence();
    this->template gemm_scores<Tile::kHeadDim, true>(scores, Smem::kK,
                                                     smem + Smem::kQ + q.stage * Smem::kTileBytes);
    ptx::wgmma_commit_group();
  }

  // Read while the GEMM runs: there is no room for them beside the operands of
  // the one before.
  __device__ void load_lse(int step) {
    const uint32_t values = smem + Smem::kLse + (step & 1) * Smem::kRowBytes + lane() % 4 * 8;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 v = ptx::load_shared_f32x2(values + 32 * j);
      lse[j] = {v.x - kProbExponent, v.y - kProbExponent};
    }
  }

  __device__ void finish_scores(int step, int q0, int group, bool masked) {
    load_lse(step);
    ptx::wgmma_wait_group<0>();
    ptx::pin(scores);
    this->release(bars().q_empty(step & 1));
    if constexpr (kGeneral) modify_scores(q0, group);
    if (masked) {
      mask_scores(q0);
      __syncwarp();
    }
    probabilities();
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Tile::kHeadDimV / 2; ++i) dv[i] = 0.0f;
  }

  // P to the other warpgroup, once dS of the step before has been used in both
  // blocks.
  __device__ void send_p(int step) {
    ptx::mbarrier_wait(bars().ds_empty(), (step & 1) ^ 1);
#pragma unroll
    for (int k = 0; k < kScores / 8; ++k) {
      ptx::store_shared_16(this->warp_ds() + k * 512 + lane() * 16, p_out[k]);
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(bars().p_full());
  }

  // dV and dQ of a step, and S and P of the next one (kMore), of Q block q0.
  template <bool kMore>
  __device__ void step(int step, int q0, int group, bool masked) {
    const RingStep<Tile::kDoutStages> dout(step);
    ptx::mbarrier_wait(bars().dout_full(dout.stage), dout.phase);
    ptx::pin(dv);
    Base::pin_operand(p16);
    ptx::wgmma_fence();
    this->template gemm_out<Tile::kHeadDimV>(dv, p16,
                                             smem + Smem::kDout + dout.stage * Smem::kTileBytesV);
    ptx::wgmma_commit_group();
    if constexpr (kMore) {
      issue_scores(step + 1);
      ptx::wgmma_wait_group<1>();
    } else {
      ptx::wgmma_wait_group<0>();
    }
    ptx::pin(dv);
    Base::pin_operand(p16);
    this->release(bars().dout_empty(dout.stage));
    if constexpr (kMore) finish_scores(step + 1, q0, group, masked);

    float dq[kDq];
    ptx::mbarrier_wait(bars().ds_full(), step & 1);
    ptx::wgmma_fence();
    this->gemm_dq(dq);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin(dq);
    this->release(bars().ds_empty());
    if constexpr (kMore) send_p(step + 1);
    this->stage_dq(dq);
  }

  __device__ void run() {
    if (task.num_steps() == 0) {
      clear();
    } else {
      const int full_begin = task.blocks.full_begin, full_end = task.blocks.full_end;
      ptx::mbarrier_wait(bars().kv_full(), 0);
      BwdSteps at(task);
      const auto masked = [&] { return at.q_block < full_begin || at.q_block >= full_end; };
      issue_scores(0);
      finish_scores(0, at.q_block * Tile::kBlockQ, 0, masked());
      send_p(0);
      clear();  // not before: the scores take its place
      int i = 0;
#pragma unroll 1
      for (at.next(); at.left > 0; at.next(), ++i) {
        step<true>(i, at.q_block * Tile::kBlockQ, at.group, masked());
      }
      step<false>(i, 0, 0, false);
    }
    if (args.base.params.dv) this->template stage_out<Tile::kHeadDimV>(dv, kProbScale);
    this->finish();
  }
};

template <class Tile, DType kDType>
struct BwdWideGradients : BwdWideWarpgroup<Tile, kDType, 1> {
  using Base = BwdWideWarpgroup<Tile, kDType, 1>;
  using Smem = typename Base::Smem;
  using Base::args, Base::task, Base::smem, Base::rank, Base::thread;
  using Base::bars, Base::lane, Base::warp, Base::kScores, Base::kDq;

  float dk[Tile::kHeadDim / 2], dp[kScores];
  uint32_t ds16[kScores / 8][4];  // A operand of dK, one row a k-step

  // Accumulators of dP^T start at -delta of their column.
  __device__ void preset_dp(int stage) {
    const uint32_t delta = smem + Smem::kDelta + stage * Smem::kRowBytes + lane() % 4 * 8;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 d = ptx::load_shared_f32x2(delta + 32 * j);
      dp[4 * j] = dp[4 * j + 2] = d.x;
      dp[4 * j + 1] = dp[4 * j + 3] = d.y;
    }
    ptx::pin(dp);
  }

  // dS^T = P^T o dP^T, where dP^T already is less delta.
  __device__ void score_gradients() {
#pragma unroll
    for (int k = 0; k < kScores / 8; ++k) {
      uint32_t p[4];
      ptx::load_shared_16(p, this->warp_ds() + k * 512 + lane() * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = ptx::unpack<DType::kFloat16>(p[i]);
        const float* d = dp + 8 * k + 2 * i;
        ds16[k][i] = ptx::pack<kDType>(v.x * (d[0] * kProbScale), v.y * (d[1] * kProbScale));
      }
    }
  }

  // dS as [key][row], rows contiguous, over the P of the same warp; then a copy
  // for the peer.
  __device__ void store_ds() {
    const int row = lane() % 16;
    __syncwarp();  // P has been read
#pragma unroll
    for (int c = 0; c < Tile::kBlockQ / 16; ++c) {
      const int chunk = c * 2 + lane() / 16;
      ptx::stmatrix_x4(this->warp_ds() + row * 128 + ((chunk ^ (row & 7)) << 4), ds16[c]);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane() == 0) {
      ptx::mbarrier_arrive_expect_tx(bars().ds_full(),
                                     2048);  // the peer's copy of as much
      ptx::bulk_copy_to_peer(this->at_peer(this->warp_ds() + Smem::kDsBytes), this->warp_ds(), 2048,
                             this->at_peer(bars().ds_full()));
    }
  }

  __device__ void step(int step) {
    const RingStep<Tile::kDoutStages> dout(step);
    ptx::mbarrier_wait(bars().dout_full(dout.stage), dout.phase);
    preset_dp(dout.stage);
    ptx::wgmma_fence();
    this->template gemm_scores<Tile::kHeadDimV, false>(
        dp, Smem::kV, smem + Smem::kDout + dout.stage * Smem::kTileBytesV);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin(dp);
    this->release(bars().dout_empty(dout.stage));

    ptx::mbarrier_wait(bars().p_full(), step & 1);
    score_gradients();
    store_ds();
    ptx::pin(dk);
    Base::pin_operand(ds16);
    ptx::wgmma_fence();
    this->template gemm_out<Tile::kHeadDim>(dk, ds16,
                                            smem + Smem::kQ + (step & 1) * Smem::kTileBytes);
    ptx::wgmma_commit_group();
    float dq[kDq];
    ptx::mbarrier_wait(bars().ds_full(), step & 1);
    ptx::wgmma_fence();
    this->gemm_dq(dq);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::pin(dk);
    Base::pin_operand(ds16);
    this->release(bars().q_empty(step & 1));
    ptx::wgmma_wait_group<0>();
    ptx::pin(dq);
    this->release(bars().ds_empty());
    this->stage_dq(dq);
  }

  __device__ void run() {
#pragma unroll
    for (int i = 0; i < Tile::kHeadDim / 2; ++i) dk[i] = 0.0f;
    const int steps = task.num_steps();
    if (steps > 0) {
      ptx::mbarrier_wait(bars().kv_full(), 0);
#pragma unroll 1
      for (int i = 0; i < steps; ++i) step(i);
    }
    if (args.base.params.dk)
      this->template stage_out<Tile::kHeadDim>(dk, args.base.params.fwd.softmax_scale);
    this->finish();
  }
};

}  // namespace flash_cuda::sm90
