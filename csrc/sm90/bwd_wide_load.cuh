// The warps that move data: loads, dQ sums, dV and dK.
#pragma once

#include "common/tma_rows.cuh"
#include "ptx/cluster.h"
#include "ptx/fence.h"
#include "ptx/griddep.h"
#include "ptx/named_barrier.h"
#include "ptx/red.h"
#include "ptx/tma.h"
#include "sm90/bwd_bias_tile.cuh"
#include "sm90/bwd_wide_smem.cuh"

namespace flash_cuda::sm90 {

// The kernel's arguments beside the tensor maps.
struct BwdWideArgs {
  BwdArgs base;
  BwdRowMaps rows;
};

// One thread: K and V of the own keys, and of the peer's keys the columns that dQ needs here.
template <class Tile, bool kClipped>
__device__ __forceinline__ void bwd_wide_load_kv(const BwdWideArgs& args, const BwdMaps& maps,
                                                 const BwdTask<Tile>& task, uint32_t smem,
                                                 uint32_t rank) {
  using Smem = BwdWideSmem<Tile>;
  const uint32_t bar = BwdWideBarriers{smem + Smem::kBarriers}.kv_full();
  const auto locate = [&](const RowMap& map) {
    return map.locate(task.kv_row0, task.mask.seqlen_kv, task.kv_head, task.kv_batch);
  };
  const MapRows k = locate(args.rows.k), v = locate(args.rows.v);
  const int own = task.kv0 + rank * Tile::kKeys, peers = task.kv0 + (rank ^ 1) * Tile::kKeys;
  ptx::mbarrier_arrive_expect_tx(bar, Smem::kTileBytes + Smem::kTileBytesV + Smem::kPeerBytes);
#pragma unroll
  for (int p = 0; p < Tile::kPanels; ++p) {
    load_rows<kClipped>(smem + Smem::kK + p * Tile::kPanelBytes, &maps.k, bar, p * 64, own, k,
                        ptx::kEvictFirst);
  }
#pragma unroll
  for (int p = 0; p < Tile::kPanelsV; ++p) {
    load_rows<kClipped>(smem + Smem::kV + p * Tile::kPanelBytes, &maps.v, bar, p * 64, own, v,
                        ptx::kEvictFirst);
  }
#pragma unroll
  for (int p = 0; p < Tile::kPeerPanels; ++p) {
    load_rows<kClipped>(smem + Smem::kPeerK + p * Tile::kPanelBytes, &maps.k, bar,
                        (rank * (Tile::kPanels / 2) + p) * 64, peers, k, ptx::kEvictFirst);
  }
}

// One thread: this block's half of the rows of a Q or dO tile, into both blocks, and for itself
// lse2 or -delta of all rows.
template <class Tile, int kPanels, bool kClipped>
__device__ __forceinline__ void bwd_wide_load_rows(const CUtensorMap& map, const float* row_values,
                                                   uint32_t tile, uint32_t values, uint32_t bar,
                                                   const MapRows& rows, int q0, uint32_t rank) {
  using Smem = BwdWideSmem<Tile>;
  constexpr int kHalf = Tile::kBlockQ / 2;
  ptx::mbarrier_arrive_expect_tx(bar, kPanels * Tile::kPanelBytes + Smem::kRowBytes);
#pragma unroll
  for (int p = 0; p < kPanels; ++p) {
    load_rows_multicast<kClipped>(tile + p * Tile::kPanelBytes + rank * kHalf * 128, &map, bar,
                                  p * 64, q0 + rank * kHalf, rows, 3, ptx::kEvictLast);
  }
  ptx::bulk_load(values, row_values, Smem::kRowBytes, bar);
}

// One thread: Q, dO, lse2 and delta of every step of a task; `step` counts on through the tasks.
template <class Tile, bool kClipped>
__device__ __forceinline__ void bwd_wide_load_steps(const BwdWideArgs& args, const BwdMaps& maps,
                                                    const BwdTask<Tile>& task, uint32_t smem,
                                                    uint32_t rank, int& step) {
  using Smem = BwdWideSmem<Tile>;
  const BwdWideBarriers bars{smem + Smem::kBarriers};
  const BwdWorkspace& work = args.base.work;
  const int draw_at = min_of(task.num_steps(), args.base.draw_at);
#pragma unroll 1
  for (BwdSteps at(task); at.left > 0; at.next(), ++step) {
    const int head = task.first_q_head() + at.group, q0 = at.q_block * Tile::kBlockQ;
    const auto locate = [&](const RowMap& map) {
      return map.locate(task.q_row0, task.mask.seqlen_q, head, task.q_batch);
    };
    const int64_t row = (head * work.row_blocks + task.row_block_base + at.q_block) * Tile::kBlockQ;
    if (at.left == draw_at) ptx::mbarrier_arrive(bars.near_end());
    const RingStep<Tile::kQStages> q(step);
    ptx::mbarrier_wait(bars.q_empty(q.stage), q.phase ^ 1);
    bwd_wide_load_rows<Tile, Tile::kPanels, kClipped>(
        maps.q, work.lse2 + row, smem + Smem::kQ + q.stage * Smem::kTileBytes,
        smem + Smem::kLse + q.stage * Smem::kRowBytes, bars.q_full(q.stage), locate(args.rows.q),
        q0, rank);
    const RingStep<Tile::kDoutStages> dout(step);
    ptx::mbarrier_wait(bars.dout_empty(dout.stage), dout.phase ^ 1);
    bwd_wide_load_rows<Tile, Tile::kPanelsV, kClipped>(
        maps.dout, work.delta + row, smem + Smem::kDout + dout.stage * Smem::kTileBytesV,
        smem + Smem::kDelta + dout.stage * Smem::kRowBytes, bars.dout_full(dout.stage),
        locate(args.rows.dout), q0, rank);
  }
}

// One thread: the operands of every task.
template <class Tile, bool kClipped>
__device__ __forceinline__ void bwd_wide_load(const BwdWideArgs& args, const BwdMaps& maps,
                                              uint32_t smem, uint8_t* smem_ptr, uint32_t rank) {
  const BwdWideBarriers bars{smem + BwdWideSmem<Tile>::kBarriers};
  int step = 0;
  uint32_t kv_phase = 1;  // K and V start empty
  for (RingPlace tasks;; tasks.next()) {
    ptx::mbarrier_wait(bars.task_full(tasks.slot), tasks.phase);
    const BwdTask<Tile>& task = bwd_wide_task_at<Tile>(smem_ptr, tasks.slot);
    if (task.none) return;
    if (task.num_steps() == 0) {
      ptx::mbarrier_arrive(bars.near_end());
    } else {
      ptx::mbarrier_wait(bars.kv_empty(), kv_phase);
      kv_phase ^= 1;
      bwd_wide_load_kv<Tile, kClipped>(args, maps, task, smem, rank);
      ptx::griddep_wait();  // lse2 and delta come from the pre-pass
      bwd_wide_load_steps<Tile, kClipped>(args, maps, task, smem, rank, step);
    }
    ptx::mbarrier_arrive(bars.task_empty(tasks.slot));
  }
}

// One thread: zeroes a block's half of a task's part of the dQ sums of a section that is yet to
// come, if there is one, see bwd_zero_sums.
template <class Tile>
__device__ __forceinline__ void bwd_wide_zero_sums(const BwdArgs& args, const BwdTask<Tile>& task,
                                                   uint32_t smem, uint32_t rank) {
  using Smem = BwdWideSmem<Tile>;
  constexpr int kHalfBytes = Tile::kBlockQ * Tile::kHeadDim * 2;
  static_assert(kHalfBytes % Smem::kZeroBytes == 0);
  if (task.section + args.sections_ahead >= args.num_sections) return;
  const ItemRange items = items_to_zero(args, task);
#pragma unroll 1
  for (int item = items.begin; item < items.end; ++item) {
    char* const sums = reinterpret_cast<char*>(args.work.dq) +
                       (2 * args.row_block_number(item) + rank) * kHalfBytes;
#pragma unroll 4
    for (int i = 0; i < kHalfBytes; i += Smem::kZeroBytes) {
      ptx::bulk_store(sums + i, smem + Smem::kZeros, Smem::kZeroBytes, ptx::kEvictLast);
    }
  }
  ptx::bulk_commit_group();
  ptx::bulk_wait_group<0>();
  ptx::fence_proxy_async_global();
  ptx::add_release(args.work.zeroed + task.section + args.sections_ahead, 1);
}

// One thread of each block. The first block draws tasks in order, so that whatever a task waits for
// in deterministic mode is running or done, and tells the second; each finds out for itself what
// there is to do. The next task is drawn shortly before the end of one.
template <class Tile, bool kShare>
__device__ __forceinline__ void bwd_wide_draw(const BwdWideArgs& args, uint32_t smem,
                                              uint8_t* smem_ptr, uint32_t rank, uint32_t peer) {
  using Smem = BwdWideSmem<Tile>;
  const BwdWideBarriers bars{smem + Smem::kBarriers};
  const BwdArgs& base = args.base;
  uint32_t told = 0;  // parity of the numbers that have passed from block to block
  int index = 0;
  bool second = false;  // piece of a share
  ptx::griddep_wait();  // the pre-pass sets the counter
  for (RingPlace tasks;; tasks.next()) {
    BwdTask<Tile>& task = bwd_wide_task_at<Tile>(smem_ptr, tasks.slot);
    ptx::mbarrier_wait(bars.near_end(), tasks.slot ^ 1);
    ptx::mbarrier_wait(bars.task_empty(tasks.slot), tasks.phase ^ 1);
    do {
      if (!second) {  // else both blocks know
        if (rank == 0) {
          index = atomicAdd(base.work.next_task, 1);
          ptx::mbarrier_wait(bars.index_empty(), told ^ 1);
          ptx::store_cluster_async_4(smem + Smem::kIndex + peer, index, bars.index_full() + peer);
        } else {
          ptx::mbarrier_arrive_expect_tx(bars.index_full(), 4);
          ptx::mbarrier_wait(bars.index_full(), told);
          index = *reinterpret_cast<volatile int*>(smem_ptr + Smem::kIndex);
          ptx::mbarrier_arrive_cluster(bars.index_empty() + peer);
        }
        told ^= 1;
      }
      task.none = index >= base.num_draws;
      if (task.none) break;
      second = bwd_task<Tile, kShare>(base, index, second, task);
    } while (task.kv0 >= task.kv_slot_end);  // a spare block of a packed batch
    ptx::mbarrier_arrive(bars.task_full(tasks.slot));
    if (task.none) return;
    if (base.sections_ahead) bwd_wide_zero_sums<Tile>(base, task, smem, rank);
  }
}

// First column of a warpgroup's part of dQ, in its block's half. The half panel of an odd number of
// panels is the last part of the first block's half and the first part of the second's.
template <class Tile, int kWarpgroup>
__device__ __forceinline__ int bwd_wide_dq_col(uint32_t rank) {
  if (Tile::kOddPanels) return rank != kWarpgroup ? 0 : kWarpgroup == 0 ? 64 : 32;
  return kWarpgroup * 64;
}

// A warp for each of the two warpgroups and its staging buffer: dQ is added to the workspace, then
// dV or dK is stored. In deterministic mode the warps take whole steps in turns, since to see, take
// and pass on a turn takes about as long as a step.
template <class Tile, int kWarpgroup, bool kClipped>
struct BwdWideStore {
  using Smem = BwdWideSmem<Tile>;
  static constexpr int kHalf = Tile::kBlockQ * Tile::kHeadDim / 2;  // floats of a block's dQ
  // Deterministic mode: the second warpgroup's buffer is handed back when both parts are on their
  // way, which leads to the end of a step sooner; in the shorter steps of smaller head dims as soon
  // as it has been read.
  static constexpr bool kTogether = Tile::kHeadDim > 192;
  template <int kOf>
  static constexpr int kPartBytes = Tile::kBlockQ * Tile::dq_cols(kOf) * 4;
  const BwdWideArgs& args;
  const uint32_t staging, rank;  // the first warpgroup's
  int step = 0;
  __device__ static bool leader() { return threadIdx.x % 32 == 0; }
  __device__ static void wait_full(int warpgroup) {
    ptx::named_barrier_sync(kWideFull + warpgroup + 2 * kWarpgroup, 160);
  }
  __device__ static void hand_back(int warpgroup) {
    __syncwarp();
    ptx::named_barrier_arrive(kWideEmpty + warpgroup, 160);
  }

  // The first warpgroup's buffer is free: for the bias of step `ahead`, if there is one, else for
  // the warpgroup.
  __device__ void grant(const BwdMaps& maps, uint32_t smem, const BwdTask<Tile>& task,
                        const BwdSteps<Tile>& ahead) const {
    if (ahead.left <= 0) return hand_back(0);
    if (leader()) {
      load_bias_panels<2>(args.base, maps, staging,
                          BwdWideBarriers{smem + Smem::kBarriers}.bias_full(), task.sequence,
                          task.first_q_head() + ahead.group, task.kv0 + rank * Tile::kKeys,
                          ahead.q_block * Tile::kBlockQ);
    }
    __syncwarp();
  }

  // dS of a step to the gradient of the bias, by way of the second warpgroup's buffer.
  __device__ void add_dbias(const BwdMaps& maps, const BwdTask<Tile>& task,
                            const BwdSteps<Tile>& at) const {
    wait_full(1);
    if (leader()) {
      store_dbias_part(args.base.params, maps.dbias, staging + Smem::kStagingBytes, task.sequence,
                       task.first_q_head() + at.group, task.kv0 + rank * Tile::kKeys,
                       at.q_block * Tile::kBlockQ);
      ptx::bulk_wait_group_read<0>();
    }
    hand_back(1);
  }

  // One thread: a warpgroup's columns, to a block's half of the sums of a row block.
  template <int kOf>
  __device__ void add_part(float* half) const {
    ptx::bulk_reduce_add_f32(half + bwd_wide_dq_col<Tile, kOf>(rank) * Tile::kBlockQ,
                             staging + kOf * Smem::kStagingBytes, kPartBytes<kOf>, ptx::kEvictLast);
    ptx::bulk_commit_group();
  }

  // Deterministic mode: both parts of a block's half of the sums. `done`: a buffer has been read.
  template <class Done>
  __device__ void add_in_turn(float* sums, int* turn, int mine, const Done& done) const {
    wait_full(1);  // comes first
    if (leader()) {
      wait_for_turn(turn, mine);
      add_part<1>(sums);
      if (!kTogether) ptx::bulk_wait_group_read<0>();
    }
    __syncwarp();
    if (!kTogether) done(1);
    wait_full(0);
    if (leader()) {
      add_part<0>(sums);
      if (kTogether) ptx::bulk_wait_group_read<1>();
    }
    if (kTogether) {
      __syncwarp();
      done(1);
    }
    if (leader()) ptx::bulk_wait_group_read<0>();
    done(0);
    if (leader()) {
      ptx::bulk_wait_group<0>();
      pass_turn(turn, mine);
    }
    __syncwarp();
  }

  __device__ void add_dq(const BwdMaps& maps, uint32_t smem, const BwdTask<Tile>& task) {
    const BwdWorkspace& work = args.base.work;
    constexpr bool kBias = Tile::kBiasStages > 0;
    const bool tiles = kBias && args.base.bias_read == BiasAccess::kTiles;
    const bool dbias_tiles = kBias && args.base.bias_write == BiasAccess::kTiles;
    if (leader()) wait_zeroed(args.base, task.section, 2);
    BwdSteps at(task), ahead(task);  // the step whose bias is to be loaded
    if (tiles && at.left > 0) {
      const bool mine = work.dq_turn ? (step & 1) == kWarpgroup : kWarpgroup == 0;
      for (int i = 0; i < 2; ++i, ahead.next()) {
        if (!mine) continue;
        wait_full(0);
        grant(maps, smem, task, ahead);
      }
    }
    const auto done = [&](int of) {
      if (tiles && of == 0) {
        grant(maps, smem, task, ahead);
      } else {
        hand_back(of);
      }
    };
#pragma unroll 1
    for (; at.left > 0; at.next(), ahead.next()) {
      const int64_t half = 2 * ((task.first_q_head() + at.group) * work.row_blocks +
                                task.row_block_base + at.q_block) +
                           rank;
      float* const sums = work.dq + half * kHalf;
      if (!work.dq_turn) {
        if (kWarpgroup == 1 && dbias_tiles) add_dbias(maps, task, at);
        wait_full(kWarpgroup);
        if (leader()) {
          add_part<kWarpgroup>(sums);
          ptx::bulk_wait_group_read<0>();
        }
        done(kWarpgroup);
        continue;
      }
      if ((step++ & 1) != kWarpgroup) continue;
      if (dbias_tiles) add_dbias(maps, task, at);
      add_in_turn(sums, work.dq_turn + half, task.turn(at.q_block), done);
    }
  }

  // 64 keys, two panels at a time.
  template <int kPanels>
  __device__ void store_out(const CUtensorMap& map, const RowMap& out,
                            const BwdTask<Tile>& task) const {
    const MapRows rows = out.locate(task.kv_row0, task.kv_slot_end, task.kv_head, task.kv_batch);
    const int row = task.kv0 + rank * Tile::kKeys;
#pragma unroll 1
    for (int p = 0; p < kPanels; p += 2) {
      wait_full(kWarpgroup);
      if (leader() && task.stores[kWarpgroup]) {
        for (int i = 0; i < min_of(2, kPanels - p); ++i) {
          store_rows<kClipped>(&map,
                               staging + kWarpgroup * Smem::kStagingBytes + i * Tile::kPanelBytes,
                               (p + i) * 64, row, rows);
        }
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();
      }
      hand_back(kWarpgroup);
    }
  }

  __device__ void run(const BwdMaps& maps, uint32_t smem, uint8_t* smem_ptr) {
    const BwdWideBarriers bars{smem + Smem::kBarriers};
    const BwdParams& p = args.base.params;
    ptx::griddep_wait();  // the pre-pass zeroes the sums
    ptx::named_barrier_arrive(kWideEmpty + kWarpgroup, 160);
    for (RingPlace tasks;; tasks.next()) {
      ptx::mbarrier_wait(bars.task_full(tasks.slot), tasks.phase);
      const BwdTask<Tile>& task = bwd_wide_task_at<Tile>(smem_ptr, tasks.slot);
      if (task.none) return;
      add_dq(maps, smem, task);
      if constexpr (kWarpgroup == 0) {
        if (p.dv) store_out<Tile::kPanelsV>(maps.dv, args.rows.dv, task);
      } else {
        if (p.dk) store_out<Tile::kPanels>(maps.dk, args.rows.dk, task);
      }
      __syncwarp();
      if (leader()) ptx::mbarrier_arrive(bars.task_empty(tasks.slot));
    }
  }
};

}  // namespace flash_cuda::sm90
