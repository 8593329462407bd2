// What the two warpgroups that compute have in common. Each has its own GEMMs: the first S, dV and
// some of this block's columns of dQ, the second dP, dK and the other columns.
#pragma once

#include "common/mask.h"
#include "ptx/convert.h"
#include "ptx/fence.h"
#include "ptx/math.h"
#include "ptx/named_barrier.h"
#include "ptx/smem_addr.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/bwd_pieces.cuh"
#include "sm90/bwd_wide_load.cuh"

namespace flash_cuda::sm90 {

// Probabilities are computed times 2^14: as float16 numbers, in which they pass from one warpgroup
// to the other, they then are exact to 2^-11 from 4e-9 up to 1.
constexpr float kProbExponent = 14.0f;
constexpr float kProbScale = 1.0f / 16384.0f;

// Whether tasks are shared (BwdShares). That needs registers: with kAnew addresses are worked out
// in every step that would else be kept, some of them in memory. What serves a call best is
// measured.
enum class WideSharing { kNone, kKept, kAnew };

template <class Tile, DType kDType, int kWarpgroup, WideSharing kSharing>
struct BwdWideWarpgroup {
  static constexpr bool kAnew = kSharing == WideSharing::kAnew;
  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  static constexpr int kScores = Tile::kBlockQ / 2;  // accumulators a thread of a 64 x 64 tile
  static constexpr int kDqCols = Tile::dq_cols(kWarpgroup);
  static constexpr bool kBias = Tile::kBiasStages > 0;
  static constexpr int kDq = kDqCols / 2;  // of 64 rows x its columns of dQ
  using Smem = BwdWideSmem<Tile>;
  static constexpr int kStaging = Smem::kStaging + kWarpgroup * Smem::kStagingBytes;
  static constexpr uint64_t kDesc =
      ptx::wgmma_desc_base(Tile::kPanelBytes, 1024, ptx::kDescSwizzle128);

  const BwdWideArgs& args;
  const uint32_t smem;
  const uint32_t rank, peer;  // peer: of shared memory, added to an address of this block's
  const int thread;           // in the warpgroup
  BwdTask<Tile>* task = nullptr;

  __device__ int lane() const { return thread & 31; }
  __device__ int warp() const { return thread >> 5; }
  // First of the two keys of this thread; the other is 8 further.
  __device__ int key() const { return task->kv0 + rank * Tile::kKeys + warp() * 16 + lane() / 4; }
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

  // acc = A B^T over kDim columns, A: the 64 keys, B: 64 rows. kFresh: from zero.
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

  // For gemm_dq: if it is read in each step, the descriptors are not kept.
  __device__ uint32_t block_rank() const { return kAnew ? ptx::cluster_block_rank() : rank; }

  // dQ = dS K over the keys of both blocks, the columns of this warpgroup.
  __device__ void gemm_dq(float (&dq)[kDq], uint32_t rank) const {
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

  // To the store warp that serves a step: the staging buffer is written, or a bias read from it.
  __device__ void hand_to_store(int step) const {
    const int warp = args.base.params.deterministic ? step & 1 : kWarpgroup;
    ptx::named_barrier_arrive(kWideFull + kWarpgroup + 2 * warp, 160);
  }
  __device__ void wait_staging() const { ptx::named_barrier_sync(kWideEmpty + kWarpgroup, 160); }
  __device__ bool bias_tiles() const {
    return kBias && kWarpgroup == 0 && args.base.bias_read == BiasAccess::kTiles;
  }
  // A thread's share of the bias of a step, or of its gradient.
  __device__ BwdBiasPart<kDType> bias_part(int q0, int group) const {
    return {args.base,
            task->mask,
            task->sequence,
            task->first_q_head() + group,
            smem + kStaging,
            thread,
            static_cast<int>(task->kv0 + rank * Tile::kKeys),
            q0};
  }

  // Hands dQ to a store warp: 16 bytes a thread and column group, in accumulator order. The buffer
  // is free, or the warpgroup has read from it the bias of the next step (kMore).
  template <bool kMore>
  __device__ void stage_dq(const float (&dq)[kDq], int step) const {
    if (kMore && bias_tiles()) {
      ptx::named_barrier_sync(kWideBiasRead, 128);
    } else {
      wait_staging();
    }
    const uint32_t staging = smem + kStaging + thread * 16;
#pragma unroll
    for (int i = 0; i < kDq / 4; ++i) {
      ptx::store_shared_16(staging + i * 2048,
                           {__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                            __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])});
    }
    ptx::fence_proxy_async_shared();
    hand_to_store(step);
  }

  // Hands dK or dV to the store warp, two panels at a time.
  template <int kDim>
  __device__ void stage_out(float (&acc)[kDim / 2], float scale) const {
    uint32_t me[1] = {static_cast<uint32_t>(thread)};
    if constexpr (kAnew) ptx::pin(me);
    const int lane = me[0] % 32, row = me[0] / 32 * 16 + lane % 16;
    const uint32_t base = smem + kStaging + row * 128;
#pragma unroll
    for (int p = 0; p < kDim / 64; p += 2) {
      wait_staging();
#pragma unroll
      for (int c = 0; c < 8 && p * 4 + c < kDim / 16; ++c) {
        const int chunk = (c % 4) * 2 + lane / 16;
        const float* a = acc + 32 * p + 8 * c;
        ptx::stmatrix_x4(base + (c / 4) * Tile::kPanelBytes + ((chunk ^ (row & 7)) << 4),
                         {ptx::pack<kDType>(a[0] * scale, a[1] * scale),
                          ptx::pack<kDType>(a[2] * scale, a[3] * scale),
                          ptx::pack<kDType>(a[4] * scale, a[5] * scale),
                          ptx::pack<kDType>(a[6] * scale, a[7] * scale)});
      }
      ptx::fence_proxy_async_shared();
      ptx::named_barrier_arrive(kWideFull + 3 * kWarpgroup, 160);
    }
  }

  // A piece of a shared task: its accumulators join those of the other pieces, or become their sum.
  template <int kCount>
  __device__ void join(float (&acc)[kCount]) const {
    if (task->pieces == 1) return;
    uint32_t me[2] = {2 * rank + kWarpgroup, static_cast<uint32_t>(thread)};
    ptx::pin(me);  // or the addresses would be kept through all steps
    constexpr int kVectors = BwdWorkspace::piece_floats(Tile::kHeadDim) / 4 / BwdWorkspace::kJoins;
    const BwdWorkspace& work = args.base.work;
    join_pieces<128>(args.base, *task,
                     reinterpret_cast<float4*>(work.pieces) + me[0] * kVectors + me[1],
                     work.pieces_done + BwdWorkspace::kJoins * task->shared + me[0], me[1] == 0,
                     task->stores[kWarpgroup], kWideJoin + kWarpgroup, acc);
  }

  // P and then dS of a warp's 16 keys.
  __device__ uint32_t warp_ds() const { return smem + Smem::kDs + warp() * 2048; }

  // All tasks: work(whether there are steps), then out() while the next task's K and V come.
  template <class Work, class Out>
  __device__ void for_tasks(uint8_t* smem_ptr, const Work& work, const Out& out) {
    uint32_t kv_phase = 0;
    for (RingPlace tasks;; tasks.next()) {
      ptx::mbarrier_wait(bars().task_full(tasks.slot), tasks.phase);
      task = &bwd_wide_task_at<Tile>(smem_ptr, tasks.slot);
      if (task->none) break;
      const bool steps = task->num_steps() > 0;
      if (steps) ptx::mbarrier_wait(bars().kv_full(), kv_phase);
      work(steps);
      __syncwarp();
      if (lane() == 0) {
        if (steps) ptx::mbarrier_arrive(bars().kv_empty());
        ptx::mbarrier_arrive(bars().task_empty(tasks.slot));
      }
      if (steps) kv_phase ^= 1;
      out();
    }
    wait_staging();  // the store warp's last arrival
  }
};

}  // namespace flash_cuda::sm90
