// Backward attention by pairs of thread blocks (cta_group::2).
//
// A pair owns 256 keys of one KV head, each block 128 of them with their K, V, dK and dV. One
// thread of the leader issues all products for both blocks, which read a half each of the operand
// that they share: Q and dO of 64 queries for S and dP, 64 columns of all queries for dK and dV. dQ
// of 64 queries is summed up over all 256 keys in each block, so half of a block's dS goes to the
// peer. docs/kernels/sm100_bwd.md has the timeline.
#pragma once

#include "ptx/cluster.h"
#include "ptx/elect.h"
#include "ptx/fence.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tcgen05.h"
#include "ptx/tma.h"
#include "sm100/bwd_kernel.cuh"
#include "sm100/bwd_reduce.cuh"
#include "sm100/bwd_scores.cuh"
#include "sm100/bwd_smem.cuh"
#include "sm100/pair_rows.cuh"

namespace flash_cuda::sm100 {

// Tiles of Q and dO come whole in rows, and whole in columns; each has a barrier.
enum PairTile : uint32_t { kTileRows = 0, kTileColumns = 1 };

// ---- load: one thread of each block

template <class Tile>
struct PairLoader {
  const BwdSmem<Tile>& smem;
  const BwdArgs& args;
  const int rank;

  // Bytes complete on the leader's barrier, which waits for those of both blocks.
  __device__ __forceinline__ uint32_t expect(uint32_t full, int bytes) const {
    if (rank == 0) ptx::mbarrier_arrive_expect_tx(full, 2 * bytes);
    return ptx::mapa(full, 0);
  }

  __device__ __forceinline__ void load_kv(const BwdTask& t) const {
    const SeqInfo& s = t.seq;
    const MapRows k = args.k_rows.locate(s.kv_row0, s.seqlen_kv, t.kv_head, s.kv_batch);
    const MapRows v = args.v_rows.locate(s.kv_row0, s.seqlen_kv, t.kv_head, s.kv_batch);
    uint32_t full = expect(smem.barrier(kBwdKFull), Tile::kBytesQK);
#pragma unroll
    for (int i = 0; i < Tile::kPanelsQK; ++i) {
      load_panel(smem.k() + i * Tile::kPanelBytes, &args.k_map, full, i, t.kv0, k);
    }
    full = expect(smem.barrier(kBwdVFull), Tile::kBytesV);
#pragma unroll
    for (int i = 0; i < Tile::kPanelsV; ++i) {
      load_panel(smem.v() + i * Tile::kPanelBytes, &args.v_map, full, i, t.kv0, v);
    }
    if (!args.workspace.dq) return;
    full = expect(smem.barrier(kBwdKColsFull), 2 * Tile::kPanelBytes);
    const int first = t.kv0 - rank * Tile::kBlockKV;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_panel(smem.k_columns() + i * Tile::kPanelBytes, &args.k_map, full, rank,
                 first + i * Tile::kBlockKV, k);
    }
  }
  // 128 keys and 64 columns.
  __device__ __forceinline__ static void load_panel(uint32_t to, const CUtensorMap* map,
                                                    uint32_t full, int panel, int row,
                                                    const MapRows& at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_rows_pair(to + i * (Tile::kBoxRows * 128), map, full, panel * Tile::kPanelCols,
                     row + i * Tile::kBoxRows, at, ptx::kEvictFirst);
    }
  }

  // A tile of Q or dO from `row` on, in the one place that it has.
  __device__ __forceinline__ void load_tile(PairTile tile, uint32_t to, BwdBarrier full_barrier,
                                            BwdBarrier empty, const CUtensorMap* map,
                                            const MapRows& at, int row, uint32_t count) const {
    constexpr int kBox = Tile::kBoxRows * 128;
    const bool once = empty == kBwdQEmpty && tile == kTileRows;
    if (!once || count == 1) ptx::mbarrier_wait(smem.barrier(empty, tile), (count & 1) ^ 1);
    const uint32_t full = expect(smem.barrier(full_barrier, tile), 2 * kBox);
    to += tile * Tile::kPanelBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int half_row = tile == kTileRows ? rank : i, half_column = tile == kTileRows ? i : rank;
      load_rows_pair(to + i * kBox, map, full, half_column * Tile::kPanelCols,
                     row + half_row * Tile::kBoxRows, at, ptx::kEvictLast);
    }
  }
  // Their memory is free when dK of two blocks before is done, which has been waited for.
  __device__ __forceinline__ void load_stats(int64_t first, uint32_t count) const {
    const RingPlace<Tile::kStagesStats> place{count};
    const uint32_t stage = place.stage(), full = smem.barrier(kBwdStatsFull, stage);
    constexpr int kBytes = Tile::kBlockQ * 4;
    ptx::mbarrier_arrive_expect_tx(full, 2 * kBytes);
    ptx::bulk_load(smem.lse(stage), args.workspace.lse_log2 + first, kBytes, full);
    ptx::bulk_load(smem.delta(stage), args.workspace.row_dot + first, kBytes, full);
  }

  // In the order in which the products need them.
  __device__ __forceinline__ void run() const {
    const BwdTask& task = smem.task();
    const SeqInfo& s = task.seq;
    load_kv(task);
    uint32_t count = 0;
#pragma unroll 1
    for (BwdSteps at(task); at.left > 0; at.next(), ++count) {
      const int row = at.q_block * Tile::kBlockQ;
      const int64_t tile = at.head * args.workspace.tiles + task.tile_base + at.q_block;
      const MapRows q = args.q_rows.locate(s.q_row0, s.seqlen_q, at.head, s.q_batch);
      const MapRows dout = args.dout_rows.locate(s.q_row0, s.seqlen_q, at.head, s.q_batch);
      load_tile(kTileRows, smem.q(0), kBwdQFull, kBwdQEmpty, &args.q_map, q, row, count);
      load_stats(tile * Tile::kBlockQ, count);
      load_tile(kTileRows, smem.dout(0), kBwdDoutFull, kBwdDoutEmpty, &args.dout_map, dout, row,
                count);
      load_tile(kTileColumns, smem.dout(0), kBwdDoutFull, kBwdDoutEmpty, &args.dout_map, dout, row,
                count);
      load_tile(kTileColumns, smem.q(0), kBwdQFull, kBwdQEmpty, &args.q_map, q, row, count);
    }
  }
};

// ---- relay: one thread of each block

// Tells the leader of the peer's part of dS.
template <class Tile>
__device__ __forceinline__ void relay_ds(const BwdSmem<Tile>& smem) {
  const uint32_t arrived = smem.barrier(kBwdArrived);
  const uint32_t exchanged = ptx::mapa(smem.barrier(kBwdExchanged), 0);
  const int num_steps = smem.task().num_steps();
#pragma unroll 1
  for (int i = 0; i < num_steps; ++i) {
    ptx::mbarrier_arrive_expect_tx(arrived, Tile::kPanelBytes);
    ptx::mbarrier_wait(arrived, i % 2);
    ptx::mbarrier_arrive_cluster(exchanged);
  }
}

// ---- MMA: one thread of the leader

template <class Tile, DType kDType>
struct PairIssuer {
  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  // Rows as they lie (K-major), and rows as the depth of the product (MN-major), where no operand
  // has more than one panel of columns.
  static constexpr uint64_t kDescRows =
      ptx::tcgen05_desc_base(16, 8 * 128, ptx::kTcgen05Swizzle128);
  static constexpr uint64_t kDescDeep =
      ptx::tcgen05_desc_base(Tile::kPanelBytes, 8 * 128, ptx::kTcgen05Swizzle128);
  template <bool kDeepA, bool kDeepB, int kM, int kN>
  static constexpr uint32_t kInstruction =
      ptx::tcgen05_f16_instruction(kBf16, kDeepA, kDeepB, kM, kN);
  static constexpr int kDeepStep = 16 * 128 / 16;  // 16 rows of 128 bytes, in a descriptor's units

  const BwdSmem<Tile>& smem;
  const BwdArgs& args;

  // Made anew for each product: those of all, kept over the loop, would not fit this warp's
  // registers.
  __device__ __forceinline__ static uint64_t deep_desc(uint32_t tile) {
    return ptx::tcgen05_desc(ptx::made_anew(tile), kDescDeep);
  }

  // d = a b^T over two panels of columns: the pair's keys x queries, of which a block has 64.
  __device__ __forceinline__ void scores(uint32_t d, uint32_t a_tile, uint32_t b_tile) const {
    constexpr int kStepsPanel = Tile::kPanelCols / 16;
#pragma unroll 1
    for (int panel = 0; panel < 2; ++panel) {
      const uint64_t a = ptx::tcgen05_desc(a_tile + panel * Tile::kPanelBytes, kDescRows);
      const uint64_t b = ptx::tcgen05_desc(b_tile + panel * (Tile::kBoxRows * 128), kDescRows);
#pragma unroll
      for (int k = 0; k < kStepsPanel; ++k) {
        ptx::tcgen05_mma_ss<2>(d, a + 2 * k, b + 2 * k, kInstruction<false, false, 256, 128>,
                               panel + k > 0);
      }
    }
  }
  // d += a b over the block's queries; a: P or dS in tensor memory, its halves kHalf columns apart.
  template <int kHalf>
  __device__ __forceinline__ void gradient(uint32_t d, uint32_t a, uint32_t b_tile,
                                           bool accumulate) const {
    const uint64_t b = deep_desc(b_tile + kTileColumns * Tile::kPanelBytes);
#pragma unroll
    for (int k = 0; k < Tile::kBlockQ / 16; ++k) {
      ptx::tcgen05_mma_ts<2>(d, a + k / 4 * kHalf + k % 4 * 8, b + k * kDeepStep,
                             kInstruction<false, true, 256, 128>, accumulate || k > 0);
    }
  }
  __device__ __forceinline__ void wait(BwdBarrier which, uint32_t count, uint32_t stage = 0) const {
    ptx::mbarrier_wait(smem.barrier(which, stage), count % 2);
  }
  // What warps of both blocks have stored to tensor memory, or taken out of it.
  __device__ __forceinline__ void wait_warps(BwdBarrier which, uint32_t count) const {
    wait(which, count);
    ptx::tcgen05_fence_after_thread_sync();
  }

  __device__ __forceinline__ void issue_s(uint32_t count) const {
    wait(kBwdQFull, count, kTileRows);
    scores(Tile::kTmemS, smem.k(), smem.q(0));
    ptx::tcgen05_commit<2>(smem.barrier(kBwdSFull));
    // Later on the columns that the load warp has waited for, after this S, say it.
    if (count == 0) ptx::tcgen05_commit<2>(smem.barrier(kBwdQEmpty, kTileRows));
  }
  __device__ __forceinline__ void issue_dp(uint32_t count) const {
    wait(kBwdDoutFull, count, kTileRows);
    scores(Tile::kTmemDp, smem.v(), smem.dout(0));
    ptx::tcgen05_commit<2>(smem.barrier(kBwdDpFull));
    ptx::tcgen05_commit<2>(smem.barrier(kBwdDoutEmpty, kTileRows));
  }
  __device__ __forceinline__ void issue_dv(uint32_t count) const {
    wait(kBwdDoutFull, count, kTileColumns);
    wait_warps(kBwdPReady, count);
    gradient<Tile::kHalfP>(Tile::kTmemDv, Tile::kTmemS, smem.dout(0), count > 0);
    ptx::tcgen05_commit<2>(smem.barrier(kBwdDoutEmpty, kTileColumns));
  }
  __device__ __forceinline__ void issue_dk(uint32_t count) const {
    wait(kBwdQFull, count, kTileColumns);
    wait_warps(kBwdDsReady, count);
    gradient<Tile::kHalfDs>(Tile::kTmemDk, Tile::kTmemDp, smem.q(0), count > 0);
    ptx::tcgen05_commit<2>(smem.barrier(kBwdQEmpty, kTileColumns));
  }
  // Over the pair's keys. A block has 64 rows of dS^T and 64 columns of K.
  __device__ __forceinline__ void issue_dq(uint32_t count) const {
    wait(kBwdExchanged, count);
    const uint64_t a = deep_desc(smem.ds()), b = deep_desc(smem.k_columns());
#pragma unroll
    for (int k = 0; k < 2 * Tile::kBlockKV / 16; ++k) {
      ptx::tcgen05_mma_ss<2>(Tile::kTmemDq, a + k * kDeepStep, b + k * kDeepStep,
                             kInstruction<true, true, 128, 128>, k > 0);
    }
    ptx::tcgen05_commit<2>(smem.barrier(kBwdDqFull));
  }
  // Block count's dQ is in registers.
  __device__ __forceinline__ void wait_dq_taken(uint32_t count) const {
    wait_warps(kBwdDqEmpty, count);
  }

  // S and dP are a block ahead of dQ, whose dS crosses to the peer meanwhile. Products run in the
  // order of issue: S of a block covers P of the one before, dP covers its dS. dQ lies in the half
  // of S that P leaves free: it waits until S of the next block has been read, and S of the one
  // after that until dQ has been.
  __device__ __forceinline__ void run() const {
    const uint32_t num_steps = smem.task().num_steps();
    const bool wants_dq = args.workspace.dq;
    wait(kBwdKFull, 0);
    issue_s(0);
    wait(kBwdVFull, 0);
    issue_dp(0);
    issue_dv(0);
    if (wants_dq) wait(kBwdKColsFull, 0);
#pragma unroll 1
    for (uint32_t i = 0; i < num_steps; ++i) {
      const bool last = i + 1 == num_steps;
      if (!last) {
        if (wants_dq && i > 0) wait_dq_taken(i - 1);
        issue_s(i + 1);
      } else {
        ptx::tcgen05_commit<2>(smem.barrier(kBwdDvFull));
      }
      issue_dk(i);
      if (!last) {
        issue_dp(i + 1);
      } else {
        ptx::tcgen05_commit<2>(smem.barrier(kBwdDkFull));
      }
      if (wants_dq) {
        if (!last) {
          wait_warps(kBwdPReady, i + 1);
        } else if (i > 0) {
          wait_dq_taken(i - 1);
        }
        issue_dq(i);
      }
      if (!last) issue_dv(i + 1);
    }
  }
};

// ---- the block

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    bwd_pair_kernel(const __grid_constant__ BwdArgs args) {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  const BwdSmem<Tile> smem{ptx::smem_addr(smem_raw),
                           reinterpret_cast<BwdExchange*>(smem_raw + Tile::kSmemExchange)};
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  constexpr int kMmaWarp = 12, kLoadWarp = 13, kRelayWarp = 14;
  if (warp == 0) {
    const BwdTask task = find_task<true>(args);
    if (threadIdx.x == 0) smem.exchange->task = task;
  }
  begin_block<2>(smem, warp, kMmaWarp, Tile::kTmemColumns);
  const bool works = smem.task().valid && smem.task().num_steps() > 0;  // the same in both blocks
  if (!works) {
    if (smem.task().valid) store_zeros<Tile>(args, smem.task());
  } else if (warp < 4) {
    ptx::setmaxnreg_dec<Tile::kRegistersReduce>();
    Reduce<Tile>{smem, args, warp}.run();
  } else if (warp < kMmaWarp) {
    ptx::setmaxnreg_inc<Tile::kRegistersScores>();
    Scores<Tile, kDType>{smem, args, warp / 4 - 1, warp % 4}.run();
  } else {
    ptx::setmaxnreg_dec<Tile::kRegistersOther>();
    const int rank = ptx::cluster_block_rank();
    const bool elected = ptx::elect_one();
    if (warp == kMmaWarp && rank == 0 && elected) PairIssuer<Tile, kDType>{smem, args}.run();
    if (warp == kLoadWarp && elected) PairLoader<Tile>{smem, args, rank}.run();
    if (warp == kRelayWarp && elected && args.workspace.dq) relay_ds(smem);
  }
  // Nobody reads or writes the other's memory any more.
  end_block<2>(smem, warp, kMmaWarp, Tile::kTmemColumns);
}

}  // namespace flash_cuda::sm100
