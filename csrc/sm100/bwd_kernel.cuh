// Backward attention with tcgen05 (Blackwell).
//
// A block owns 128 keys of one KV head. Its K and V stay in shared memory, its dK and dV in tensor
// memory, while Q and dO of every query head of the group pass in blocks of 128 rows. One thread
// issues all products: S^T = K Q^T and dP^T = V dO^T, whose P^T and dS^T two warpgroups leave in
// tensor memory for dV += P^T dO and dK += dS^T Q; dQ = dS K goes through a warpgroup that adds it
// to float32 sums in global memory. docs/kernels/sm100_bwd.md has the timeline and what each
// barrier says.
#pragma once

#include "common/tma_rows.cuh"
#include "ptx/elect.h"
#include "ptx/fence.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tcgen05.h"
#include "ptx/tma.h"
#include "sm100/block.cuh"
#include "sm100/bwd_reduce.cuh"
#include "sm100/bwd_scores.cuh"
#include "sm100/bwd_smem.cuh"
#include "sm100/bwd_store.cuh"

namespace flash_cuda::sm100 {

// ---- load: one thread

template <class Tile>
struct BwdLoader {
  const BwdSmem<Tile>& smem;
  const BwdArgs& args;

  template <int kPanels>
  __device__ __forceinline__ void load(uint32_t to, uint32_t full, const CUtensorMap* map,
                                       const MapRows& at, int row, uint64_t policy) const {
    ptx::mbarrier_arrive_expect_tx(full, kPanels * Tile::kPanelBytes);
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      load_rows(to + i * Tile::kPanelBytes, map, full, i * Tile::kPanelCols, row, at, policy);
    }
  }
  __device__ __forceinline__ void load_kv(const BwdTask& t) const {
    const SeqInfo& s = t.seq;
    load<Tile::kPanelsQK>(smem.k(), smem.barrier(kBwdKFull), &args.k_map,
                          args.k_rows.locate(s.kv_row0, s.seqlen_kv, t.kv_head, s.kv_batch), t.kv0,
                          ptx::kEvictFirst);
    load<Tile::kPanelsV>(smem.v(), smem.barrier(kBwdVFull), &args.v_map,
                         args.v_rows.locate(s.kv_row0, s.seqlen_kv, t.kv_head, s.kv_batch), t.kv0,
                         ptx::kEvictFirst);
  }
  __device__ __forceinline__ void load_q(const SeqInfo& s, int head, int row,
                                         uint32_t count) const {
    const RingPlace<Tile::kStagesQ> place{count};
    const uint32_t stage = place.stage();
    ptx::mbarrier_wait(smem.barrier(kBwdQEmpty, stage), place.phase() ^ 1);
    load<Tile::kPanelsQK>(smem.q(stage), smem.barrier(kBwdQFull, stage), &args.q_map,
                          args.q_rows.locate(s.q_row0, s.seqlen_q, head, s.q_batch), row,
                          ptx::kEvictLast);
  }
  __device__ __forceinline__ void load_dout(const SeqInfo& s, int head, int row,
                                            uint32_t count) const {
    const RingPlace<Tile::kStagesDout> place{count};
    const uint32_t stage = place.stage();
    if (Tile::kDoutHasEmpty) {
      ptx::mbarrier_wait(smem.barrier(kBwdDoutEmpty, stage), place.phase() ^ 1);
    }
    load<Tile::kPanelsV>(smem.dout(stage), smem.barrier(kBwdDoutFull, stage), &args.dout_map,
                         args.dout_rows.locate(s.q_row0, s.seqlen_q, head, s.q_batch), row,
                         ptx::kEvictLast);
  }
  __device__ __forceinline__ void load_stats(int64_t first, uint32_t count) const {
    const RingPlace<Tile::kStagesStats> place{count};
    const uint32_t stage = place.stage(), full = smem.barrier(kBwdStatsFull, stage);
    constexpr int kBytes = Tile::kBlockQ * 4;
    ptx::mbarrier_arrive_expect_tx(full, 2 * kBytes);
    ptx::bulk_load(smem.lse(stage), args.workspace.lse_log2 + first, kBytes, full);
    ptx::bulk_load(smem.delta(stage), args.workspace.row_dot + first, kBytes, full);
  }

  __device__ __forceinline__ void run() const {
    const BwdTask& task = smem.task();
    load_kv(task);
    uint32_t count = 0;
#pragma unroll 1
    for (BwdSteps at(task); at.left > 0; at.next(), ++count) {
      const int row = at.q_block * Tile::kBlockQ;
      const int64_t tile = at.head * args.workspace.tiles + task.tile_base + at.q_block;
      load_q(task.seq, at.head, row, count);
      load_stats(tile * Tile::kBlockQ, count);
      load_dout(task.seq, at.head, row, count);
    }
  }
};

// ---- MMA: one thread

template <class Tile, DType kDType>
struct BwdIssuer {
  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  // Rows as they lie (K-major), and rows as the depth of the product (MN-major).
  static constexpr uint64_t kDescRows =
      ptx::tcgen05_desc_base(16, 8 * 128, ptx::kTcgen05Swizzle128);
  static constexpr uint64_t kDescDeep =
      ptx::tcgen05_desc_base(Tile::kPanelBytes, 8 * 128, ptx::kTcgen05Swizzle128);
  template <bool kDeepA, bool kDeepB, int kN>
  static constexpr uint32_t kInstruction =
      ptx::tcgen05_f16_instruction(kBf16, kDeepA, kDeepB, 128, kN);
  static constexpr int kDeepStep = 16 * 128 / 16;  // 16 rows of 128 bytes, in a descriptor's units

  const BwdSmem<Tile>& smem;
  const BwdArgs& args;

  // d = a b^T over kDepth columns: keys x queries. Panels are a loop, not unrolled: their addresses
  // would not fit this warp's registers.
  template <int kDepth>
  __device__ __forceinline__ void scores(uint32_t d, uint32_t a_tile, uint32_t b_tile) const {
    constexpr int kStepsPanel = Tile::kPanelCols / 16, kSteps = kDepth / 16;
    constexpr int kPanels = ceil_div(kSteps, kStepsPanel);
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      const uint64_t a = ptx::tcgen05_desc(a_tile + panel * Tile::kPanelBytes, kDescRows);
      const uint64_t b = ptx::tcgen05_desc(b_tile + panel * Tile::kPanelBytes, kDescRows);
#pragma unroll
      for (int k = 0; k < kStepsPanel; ++k) {
        if (kSteps % kStepsPanel && panel * kStepsPanel + k >= kSteps) break;
        ptx::tcgen05_mma_ss(d, a + 2 * k, b + 2 * k, kInstruction<false, false, 128>,
                            panel + k > 0);
      }
    }
  }
  // d += a b over the block's queries; a: P or dS in tensor memory, its halves kHalf columns apart.
  template <int kColumns, int kHalf>
  __device__ __forceinline__ void gradient(uint32_t d, uint32_t a, uint32_t b_tile,
                                           bool accumulate) const {
    const uint64_t b = ptx::tcgen05_desc(b_tile, kDescDeep);
#pragma unroll
    for (int k = 0; k < Tile::kBlockQ / 16; ++k) {
      ptx::tcgen05_mma_ts(d, a + k / 4 * kHalf + k % 4 * 8, b + k * kDeepStep,
                          kInstruction<false, true, kColumns>, accumulate || k > 0);
    }
  }

  __device__ __forceinline__ void issue_s(uint32_t count) const {
    const RingPlace<Tile::kStagesQ> place{count};
    ptx::mbarrier_wait(smem.barrier(kBwdQFull, place.stage()), place.phase());
    scores<Tile::kHeadDim>(Tile::kTmemS, smem.k(), smem.q(place.stage()));
    ptx::tcgen05_commit(smem.barrier(kBwdSFull));
  }
  __device__ __forceinline__ void wait_dout(uint32_t count) const {
    const RingPlace<Tile::kStagesDout> place{count};
    ptx::mbarrier_wait(smem.barrier(kBwdDoutFull, place.stage()), place.phase());
  }
  __device__ __forceinline__ void issue_dp(uint32_t count) const {
    const RingPlace<Tile::kStagesDout> place{count};
    scores<Tile::kHeadDimV>(Tile::kTmemDp, smem.v(), smem.dout(place.stage()));
    ptx::tcgen05_commit(smem.barrier(kBwdDpFull));
  }
  __device__ __forceinline__ void issue_dv(uint32_t count) const {
    const RingPlace<Tile::kStagesDout> place{count};
    ptx::mbarrier_wait(smem.barrier(kBwdPReady), count % 2);
    ptx::tcgen05_fence_after_thread_sync();
    gradient<Tile::kHeadDimV, Tile::kHalfP>(Tile::kTmemDv, Tile::kTmemS, smem.dout(place.stage()),
                                            count > 0);
  }
  __device__ __forceinline__ void release_dout(uint32_t count) const {
    const RingPlace<Tile::kStagesDout> place{count};
    if (Tile::kDoutHasEmpty) ptx::tcgen05_commit(smem.barrier(kBwdDoutEmpty, place.stage()));
  }
  __device__ __forceinline__ void issue_dk(uint32_t count) const {
    const RingPlace<Tile::kStagesQ> place{count};
    ptx::mbarrier_wait(smem.barrier(kBwdDsReady), count % 2);
    ptx::tcgen05_fence_after_thread_sync();
    gradient<Tile::kHeadDim, Tile::kHalfDs>(Tile::kTmemDk, Tile::kTmemDp, smem.q(place.stage()),
                                            count > 0);
    ptx::tcgen05_commit(smem.barrier(kBwdQEmpty, place.stage()));
  }
  __device__ __forceinline__ void issue_dq() const {
    const uint64_t a = ptx::tcgen05_desc(smem.ds(), kDescDeep);
    const uint64_t b = ptx::tcgen05_desc(smem.k(), kDescDeep);
#pragma unroll
    for (int k = 0; k < Tile::kBlockKV / 16; ++k) {
      ptx::tcgen05_mma_ss(Tile::kTmemDq, a + k * kDeepStep, b + k * kDeepStep,
                          kInstruction<true, true, Tile::kHeadDim>, k > 0);
    }
    ptx::tcgen05_commit(smem.barrier(kBwdDqFull));
  }
  // The readers of the dQ before block `count`'s have it in registers.
  __device__ __forceinline__ void wait_dq_taken(uint32_t count) const {
    if (count == 0 || !args.workspace.dq) return;
    ptx::mbarrier_wait(smem.barrier(kBwdDqEmpty), (count - 1) % 2);
    ptx::tcgen05_fence_after_thread_sync();
  }

  // dP, then dV, of a block; the other way round where dP has to wait for the readers of dQ.
  __device__ __forceinline__ void issue_dp_dv(uint32_t count) const {
    wait_dout(count);
    if (!Tile::kDqOverDp || count == 0) issue_dp(count);
    issue_dv(count);
    if (Tile::kDqOverDp && count > 0) {
      wait_dq_taken(count);
      issue_dp(count);
    }
    release_dout(count);
  }

  // S is a block ahead. Products run in the order of issue: dP of a block may cover dS of the one
  // before, and S may cover P, because dK and dV have been issued.
  __device__ __forceinline__ void overlapped(uint32_t num_steps) const {
    issue_s(0);
    ptx::mbarrier_wait(smem.barrier(kBwdVFull), 0);
    issue_dp_dv(0);
#pragma unroll 1
    for (uint32_t i = 0; i < num_steps; ++i) {
      if (i + 1 == num_steps)
        ptx::tcgen05_commit(smem.barrier(kBwdDvFull));
      else
        issue_s(i + 1);
      issue_dk(i);
      if (i + 1 == num_steps) ptx::tcgen05_commit(smem.barrier(kBwdDkFull));
      if (args.workspace.dq) {
        if (!Tile::kDqOverDp) wait_dq_taken(i);
        issue_dq();
      }
      if (i + 1 < num_steps) issue_dp_dv(i + 1);
    }
  }

  // One product after the other, where tensor memory has no room for two blocks.
  __device__ __forceinline__ void in_turns(uint32_t num_steps) const {
    ptx::mbarrier_wait(smem.barrier(kBwdVFull), 0);
#pragma unroll 1
    for (uint32_t i = 0; i < num_steps; ++i) {
      wait_dq_taken(i);
      issue_s(i);
      wait_dout(i);
      issue_dv(i);
      issue_dp(i);
      release_dout(i);
      if (i + 1 == num_steps) ptx::tcgen05_commit(smem.barrier(kBwdDvFull));
      issue_dk(i);
      if (i + 1 == num_steps) ptx::tcgen05_commit(smem.barrier(kBwdDkFull));
      if (args.workspace.dq) issue_dq();
    }
  }

  __device__ __forceinline__ void run() const {
    const uint32_t num_steps = smem.task().num_steps();
    ptx::mbarrier_wait(smem.barrier(kBwdKFull), 0);
    if constexpr (Tile::kInTurns) {
      in_turns(num_steps);
    } else {
      overlapped(num_steps);
    }
  }
};

// ---- the block

// No query sees a key of the tile: zero gradients, straight to global memory.
template <class Tile>
__device__ __forceinline__ void store_zeros(const BwdArgs& args, const BwdTask& t) {
  const BwdParams& p = args.params;
  const int rows = min(Tile::kBlockKV, t.seq.seqlen_kv_slot - t.kv0);
  const int64_t row0 = t.seq.kv_row0 + t.kv0;
  zero_rows(p.dk, p.dk_stride, t.seq.kv_batch, t.kv_head, row0, rows, p.fwd.head_dim);
  zero_rows(p.dv, p.dv_stride, t.seq.kv_batch, t.kv_head, row0, rows, p.fwd.head_dim_v);
}

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdArgs args) {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  const BwdSmem<Tile> smem{ptx::smem_addr(smem_raw),
                           reinterpret_cast<BwdExchange*>(smem_raw + Tile::kSmemExchange)};
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  constexpr int kMmaWarp = 12, kLoadWarp = 13;
  if (warp == 0) {
    const BwdTask task = find_task<Tile::kPair>(args);
    if (threadIdx.x == 0) smem.exchange->task = task;
  }
  begin_block<1>(smem, warp, kMmaWarp, Tile::kTmemColumns);
  const bool works = smem.task().valid && smem.task().num_steps() > 0;
  if (!works) {
    if (smem.task().valid) store_zeros<Tile>(args, smem.task());
  } else if (warp < 4) {
    if constexpr (Tile::kRegistersReduce > 128) {
      ptx::setmaxnreg_inc<Tile::kRegistersReduce>();
    } else {
      ptx::setmaxnreg_dec<Tile::kRegistersReduce>();
    }
    Reduce<Tile>{smem, args, warp}.run();
  } else if (warp < kMmaWarp) {
    ptx::setmaxnreg_inc<Tile::kRegistersScores>();
    Scores<Tile, kDType>{smem, args, warp / 4 - 1, warp % 4}.run();
  } else {
    ptx::setmaxnreg_dec<Tile::kRegistersOther>();
    if (warp == kMmaWarp && ptx::elect_one()) BwdIssuer<Tile, kDType>{smem, args}.run();
    if (warp == kLoadWarp && ptx::elect_one()) BwdLoader<Tile>{smem, args}.run();
  }
  end_block<1>(smem, warp, kMmaWarp, Tile::kTmemColumns);
}

}  // namespace flash_cuda::sm100
