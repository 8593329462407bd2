// The warps that move data: loads, dQ sums, dV and dK.
#pragma once

#include "common/tma_rows.h"
#include "ptx/fence.h"
#include "ptx/named_barrier.h"
#include "ptx/red.h"
#include "ptx/tma.h"
#include "sm90/bwd_wide_smem.cuh"

namespace flash_cuda::sm90 {

// The kernel's arguments beside the tensor maps.
struct BwdWideArgs {
  BwdArgs base;
  RowMap q, dout, k, v, dk, dv;  // how the maps find the rows of a sequence
};

// One thread: K and V of the own keys, and of the peer's keys the columns that
// dQ needs here.
template <class Tile>
__device__ __forceinline__ void bwd_wide_load_kv(const BwdWideArgs& args, const BwdMaps& maps,
                                                 const BwdTask<Tile>& task, uint32_t smem,
                                                 uint32_t rank) {
  using Smem = BwdWideSmem<Tile>;
  const uint32_t bar = BwdWideBarriers{smem + Smem::kBarriers}.kv_full();
  const auto locate = [&](const RowMap& map) {
    return map.locate(task.kv_row0, task.mask.seqlen_kv, task.kv_head, task.kv_batch);
  };
  const MapRows k = locate(args.k), v = locate(args.v);
  const int own = task.kv0 + rank * Tile::kKeys, peers = task.kv0 + (rank ^ 1) * Tile::kKeys;
  ptx::mbarrier_arrive_expect_tx(bar, Smem::kTileBytes + Smem::kTileBytesV + Smem::kPeerBytes);
#pragma unroll
  for (int p = 0; p < Tile::kPanels; ++p) {
    ptx::tma_load_4d(smem + Smem::kK + p * Tile::kPanelBytes, &maps.k, bar, p * 64, k.row0 + own,
                     k.c2, k.c3, ptx::kEvictFirst);
  }
#pragma unroll
  for (int p = 0; p < Tile::kPanelsV; ++p) {
    ptx::tma_load_4d(smem + Smem::kV + p * Tile::kPanelBytes, &maps.v, bar, p * 64, v.row0 + own,
                     v.c2, v.c3, ptx::kEvictFirst);
  }
#pragma unroll
  for (int p = 0; p < Tile::kPeerPanels; ++p) {
    ptx::tma_load_4d(smem + Smem::kPeerK + p * Tile::kPanelBytes, &maps.k, bar,
                     (rank * (Tile::kPanels / 2) + p) * 64, k.row0 + peers, k.c2, k.c3,
                     ptx::kEvictFirst);
  }
}

// One thread: this block's half of the rows of a Q or dO tile, into both
// blocks, and for itself lse2 or -delta of all rows.
template <class Tile, int kPanels>
__device__ __forceinline__ void bwd_wide_load_rows(const CUtensorMap& map, const float* row_values,
                                                   uint32_t tile, uint32_t values, uint32_t bar,
                                                   const MapRows& rows, int q0, uint32_t rank) {
  using Smem = BwdWideSmem<Tile>;
  constexpr int kHalf = Tile::kBlockQ / 2;
  ptx::mbarrier_arrive_expect_tx(bar, kPanels * Tile::kPanelBytes + Smem::kRowBytes);
#pragma unroll
  for (int p = 0; p < kPanels; ++p) {
    ptx::tma_load_4d_multicast(tile + p * Tile::kPanelBytes + rank * kHalf * 128, &map, bar, p * 64,
                               rows.row0 + q0 + rank * kHalf, rows.c2, rows.c3, 3, ptx::kEvictLast);
  }
  ptx::bulk_load(values, row_values, Smem::kRowBytes, bar);
}

// One thread: everything that a task reads.
template <class Tile>
__device__ __forceinline__ void bwd_wide_load(const BwdWideArgs& args, const BwdMaps& maps,
                                              const BwdTask<Tile>& task, uint32_t smem,
                                              uint32_t rank) {
  using Smem = BwdWideSmem<Tile>;
  const BwdWideBarriers bars{smem + Smem::kBarriers};
  const BwdWorkspace& work = args.base.work;
  if (task.num_steps() == 0) return;
  bwd_wide_load_kv<Tile>(args, maps, task, smem, rank);
  int step = 0;
#pragma unroll 1
  for (BwdSteps at(task); at.left > 0; at.next(), ++step) {
    const int head = task.first_q_head() + at.group, q0 = at.q_block * Tile::kBlockQ;
    const auto locate = [&](const RowMap& map) {
      return map.locate(task.q_row0, task.mask.seqlen_q, head, task.q_batch);
    };
    const int64_t row = (head * work.row_blocks + task.row_block_base + at.q_block) * Tile::kBlockQ;
    const RingStep<Tile::kQStages> q(step);
    ptx::mbarrier_wait(bars.q_empty(q.stage), q.phase ^ 1);
    bwd_wide_load_rows<Tile, Tile::kPanels>(maps.q, work.lse2 + row,
                                            smem + Smem::kQ + q.stage * Smem::kTileBytes,
                                            smem + Smem::kLse + q.stage * Smem::kRowBytes,
                                            bars.q_full(q.stage), locate(args.q), q0, rank);
    const RingStep<Tile::kDoutStages> dout(step);
    ptx::mbarrier_wait(bars.dout_empty(dout.stage), dout.phase ^ 1);
    bwd_wide_load_rows<Tile, Tile::kPanelsV>(
        maps.dout, work.delta + row, smem + Smem::kDout + dout.stage * Smem::kTileBytesV,
        smem + Smem::kDelta + dout.stage * Smem::kRowBytes, bars.dout_full(dout.stage),
        locate(args.dout), q0, rank);
  }
}

// First column of a warpgroup's part of dQ, in its block's half.
template <class Tile, int kWarpgroup>
__device__ __forceinline__ int bwd_wide_dq_col(uint32_t rank) {
  if (Tile::kOddPanels) return rank != kWarpgroup ? 0 : kWarpgroup == 0 ? 64 : 32;
  return kWarpgroup * 64;
}

// A warp for each of the two warpgroups and its staging buffer: dQ is added to
// the workspace, then dV or dK is stored.
template <class Tile, int kWarpgroup>
struct BwdWideStore {
  using Smem = BwdWideSmem<Tile>;
  static constexpr int kHalf = Tile::kBlockQ * Tile::kHeadDim / 2;  // floats of a block's dQ
  static constexpr int kPart = Tile::kBlockQ * Tile::dq_cols(kWarpgroup);
  const BwdWideArgs& args;
  const BwdTask<Tile>& task;
  const uint32_t staging, rank;
  __device__ static bool leader() { return threadIdx.x % 32 == 0; }
  __device__ void wait_full() const { ptx::named_barrier_sync(kWideFull + kWarpgroup, 160); }
  __device__ void hand_back() const {
    __syncwarp();
    ptx::named_barrier_arrive(kWideEmpty + kWarpgroup, 160);
  }

  // Both warps of a block add to one turn, so a block's turn is two further
  // than its predecessor's.
  __device__ void add_dq() const {
    const BwdWorkspace& work = args.base.work;
    // Columns go from low to high: the half panel of an odd number comes last
    // or first.
    const int offset = bwd_wide_dq_col<Tile, kWarpgroup>(rank) * Tile::kBlockQ;
#pragma unroll 1
    for (BwdSteps at(task); at.left > 0; at.next()) {
      const int64_t half = 2 * ((task.first_q_head() + at.group) * work.row_blocks +
                                task.row_block_base + at.q_block) +
                           rank;
      int* const turn = work.dq_turn ? work.dq_turn + half : nullptr;
      wait_full();
      if (leader()) {
        if (turn) {
          while (ptx::load_acquire(turn) < 2 * task.turn(at.q_block)) {
          }
          ptx::fence_proxy_async_global();
        }
        ptx::bulk_reduce_add_f32(work.dq + half * kHalf + offset, staging, kPart * 4,
                                 ptx::kEvictLast);
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();
      }
      hand_back();
      if (leader() && turn) {
        // The consumers need not wait until the sums have arrived.
        ptx::bulk_wait_group<0>();
        ptx::fence_proxy_async_global();
        ptx::add_release(turn, 1);
      }
    }
  }

  // 64 keys, two panels at a time.
  template <int kPanels>
  __device__ void store_out(const CUtensorMap& map, const RowMap& out) const {
    const MapRows rows = out.locate(task.kv_row0, task.kv_slot_end, task.kv_head, task.kv_batch);
    const int row = rows.row0 + task.kv0 + rank * Tile::kKeys;
#pragma unroll 1
    for (int p = 0; p < kPanels; p += 2) {
      wait_full();
      if (leader()) {
        for (int i = 0; i < min_of(2, kPanels - p); ++i) {
          ptx::tma_store_4d(&map, staging + i * Tile::kPanelBytes, (p + i) * 64, row, rows.c2,
                            rows.c3);
        }
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();
      }
      hand_back();
    }
  }

  __device__ void run(const BwdMaps& maps) const {
    const BwdParams& p = args.base.params;
    ptx::named_barrier_arrive(kWideEmpty + kWarpgroup, 160);
    add_dq();
    if constexpr (kWarpgroup == 0) {
      if (p.dv) store_out<Tile::kPanelsV>(maps.dv, args.dv);
    } else {
      if (p.dk) store_out<Tile::kPanels>(maps.dk, args.dk);
    }
  }
};

}  // namespace flash_cuda::sm90
