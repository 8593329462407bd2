// Producer of the forward kernel: copies of Q, K and V, stores of O.
#pragma once

#include "common/tma_rows.cuh"
#include "ptx/cluster.h"
#include "ptx/tma.h"
#include "sm90/fwd_schedule.cuh"

namespace flash_cuda::sm90 {

// Where a sequence's rows are; the maps of packed ones are always clipped.
template <class Tile>
__device__ __forceinline__ MapRows locate(const RowMap& rows, int first, int len, int head,
                                          int batch) {
  if constexpr (Tile::has(kPacked)) return RowMap::packed(first, len, head);
  return rows.locate(first, len, head, batch);
}

// Stores a part of O that `warpgroup` has staged, from row `row` of the sequence on.
template <class Tile>
__device__ __forceinline__ void store_part(const FwdSmem<Tile>& smem, const FwdArgs& args,
                                           int warpgroup, int part, int row, const MapRows& at) {
  constexpr int kPanels = Tile::kPanelsV / Tile::kOutParts;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    store_rows<!Tile::has(kDense)>(&args.out_map,
                                   smem.out(warpgroup) + panel * 64 * Tile::kPanelBytes,
                                   (part * kPanels + panel) * Tile::kPanelCols, row, at);
  }
  ptx::bulk_commit_group();
}

// Stores the tiles of `warpgroup`, which goes on meanwhile; one thread.
template <class Tile>
__device__ __forceinline__ void store_tiles(const FwdSmem<Tile>& smem, const FwdArgs& args,
                                            int warpgroup) {
  const auto work_ring = smem.work_ring();
  const auto ring = smem.out_ring(warpgroup);
  for (uint32_t tiles = 0;; ++tiles) {
    work_ring.wait_full(tiles);
    const FwdWork w = smem.slot(tiles).work;
    ptx::mbarrier_arrive(work_ring.empty(tiles));
    if (w.q_block < 0) break;
    const MapRows at = locate<Tile>(args.out_rows, w.q_row0, w.seqlen_q_slot, w.head, w.batch);
#pragma unroll
    for (int part = 0; part < Tile::kOutParts; ++part) {
      const uint32_t count = tiles * Tile::kOutParts + part;
      ring.wait_full(count);
      store_part(smem, args, warpgroup, part, w.q_block * Tile::kBlockQ + 64 * warpgroup, at);
      ptx::bulk_wait_group_read<0>();
      ptx::mbarrier_arrive(ring.empty(count));
    }
  }
  // The copy engine still reads this block's shared memory.
  ptx::bulk_wait_group<0>();
}

// Loads Q, K and V of every tile; one thread, or another one for Q.
template <class Tile>
struct Loader {
  static constexpr bool kMayClip = !Tile::has(kDense);
  const FwdSmem<Tile>& smem;
  const FwdArgs& args;
  uint32_t k_count = 0, v_count = 0, bias_count = 0, tiles = 0;
  int idle = 0;  // warpgroups that take no part in the tile

  // Whether this block copies what block `rank` of a pair does.
  static __device__ __forceinline__ bool is_mine(int rank) {
    return !Tile::has(kPair) || static_cast<int>(ptx::cluster_block_rank()) == rank;
  }
  // A stage of K or V: for this block, or for both of a pair.
  static __device__ __forceinline__ void expect_stage(uint32_t full, int bytes) {
    ptx::mbarrier_arrive_expect_tx(full, bytes);
    if constexpr (Tile::has(kPair)) {
      ptx::mbarrier_arrive_expect_tx_cluster(ptx::mapa(full, ptx::cluster_block_rank() ^ 1), bytes);
    }
  }
  // A block of K or V into its stage.
  template <int kPanels>
  static __device__ __forceinline__ void copy_block(uint32_t dst, const CUtensorMap* map,
                                                    int kv_block, const MapRows& rows,
                                                    uint32_t full) {
    const int row = kv_block * Tile::kBlockKV;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const uint32_t to = dst + panel * Tile::kBlockKV * Tile::kPanelBytes;
      const int column = panel * Tile::kPanelCols;
      if constexpr (Tile::has(kPair)) {
        load_rows_multicast<kMayClip>(to, map, full, column, row, rows, 3, ptx::kEvictLast);
      } else {
        load_rows<kMayClip>(to, map, full, column, row, rows, ptx::kEvictLast);
      }
    }
  }
  __device__ __forceinline__ void copy_k(int kv_block, const MapRows& rows, uint32_t full) {
    copy_block<Tile::kPanelsQK>(smem.k(k_count), &args.k_map, kv_block, rows, full);
    ++k_count;
  }
  __device__ __forceinline__ void copy_v(int kv_block, const MapRows& rows, uint32_t full) {
    copy_block<Tile::kPanelsV>(smem.v(v_count), &args.v_map, kv_block, rows, full);
    ++v_count;
  }
  // In place of idle warpgroups, where they do not pass over K and V themselves.
  __device__ __forceinline__ void give_up(uint32_t empty, int arrivals) {
    if (!Tile::has(kRagged) || Tile::kLooksAhead || idle == 0) return;
    ptx::mbarrier_arrive(empty, idle * arrivals);
  }
  // A turn that the other block of the pair copies.
  __device__ __forceinline__ void skip_turn() {
    if (!Tile::kLooksAhead) return;
    ++k_count;
    ++v_count;
  }
  __device__ __forceinline__ void load_k(int kv_block, const MapRows& rows) {
    if (!is_mine(Tile::kLooksAhead ? k_count % 2 : Tile::kLoadsK)) return skip_turn();
    const auto ring = smem.k_ring();
    const uint32_t full = ring.full(k_count);
    ring.wait_empty(k_count);
    expect_stage(full, Tile::kStageBytesK);
    give_up(ring.empty(k_count), 4);
    copy_k(kv_block, rows, full);
    // A tile's first K has its turn for itself, as has its last V.
    if (Tile::kLooksAhead) ++v_count;
  }
  __device__ __forceinline__ void load_v(int kv_block, const MapRows& rows) {
    if (!is_mine(Tile::kLooksAhead ? k_count % 2 : Tile::kLoadsV)) return skip_turn();
    const auto ring = smem.v_ring();
    const uint32_t full = ring.full(v_count);
    ring.wait_empty(v_count);
    expect_stage(full, Tile::kStageBytesV);
    give_up(ring.empty(v_count), 1);
    copy_v(kv_block, rows, full);
    if (Tile::kLooksAhead) ++k_count;
  }
  // K of a block and V of the one after it.
  __device__ __forceinline__ void load_turn(int kv_block, const MapRows& rows) {
    if (!Tile::kLooksAhead) {
      load_k(kv_block, rows);
      load_v(kv_block + 1, rows);
      return;
    }
    if (!is_mine(k_count % 2)) return skip_turn();
    const auto ring = smem.k_ring();
    const uint32_t full = ring.full(k_count);
    ring.wait_empty(k_count);
    expect_stage(full, Tile::kStageBytesK + Tile::kStageBytesV);
    copy_k(kv_block, rows, full);
    copy_v(kv_block + 1, rows, full);
  }
  // General variant, where the map serves. A row for all queries is copied once.
  __device__ __forceinline__ void load_bias(const FwdWork& w, int kv_block) {
    if (!Tile::has(kGeneral) || args.bias_rows == 0) return;
    const FwdParams& p = args.params;
    const int slices = args.bias_rows == 1 ? 1 : Tile::kWarpgroups;
    const int panels = p.bias_dtype == DType::kFloat32 ? 2 : 1;
    const int head = p.bias_head_stride ? w.head : 0, batch = p.bias_batch_stride ? w.batch : 0;
    // Read once, or by the tiles of several heads or batches.
    const uint64_t policy =
        p.bias_head_stride && p.bias_batch_stride ? ptx::kEvictFirst : ptx::kEvictNormal;
    const auto ring = smem.bias_ring();
    ring.wait_empty(bias_count);
    const uint32_t full = ring.full(bias_count);
    ptx::mbarrier_arrive_expect_tx(full, slices * panels * args.bias_rows * 128);
    for (int slice = 0; slice < slices; ++slice) {
      const int row = args.bias_rows == 1 ? 0 : w.q_block * Tile::kBlockQ + 64 * slice;
      for (int panel = 0; panel < panels; ++panel) {
        ptx::tma_load_4d(smem.bias(bias_count, slice) + panel * Tile::kBiasPanelBytes,
                         &args.bias_map, full, kv_block * Tile::kBlockKV + 32 * panel, row, head,
                         batch, policy);
      }
    }
    ++bias_count;
  }
  __device__ __forceinline__ void load_q(const FwdWork& work) {
    const int first_row = tile_row<Tile>(args, work.q_block);
    const int with_rows = warpgroups_with_rows<Tile>(args, work);
    const MapRows rows =
        locate<Tile>(args.q_rows, work.q_row0, work.seqlen_q, work.head, work.batch);
#pragma unroll
    for (int w = 0; w < Tile::kWarpgroups; ++w) {
      const auto ring = smem.q_ring(w);
      const uint32_t full = ring.full(tiles);
      ring.wait_empty(tiles);
      if (w >= with_rows) {
        ptx::mbarrier_arrive(full);
        continue;
      }
      ptx::mbarrier_arrive_expect_tx(full, Tile::kQSliceBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanelsQK; ++panel) {
        load_rows<kMayClip>(smem.q(w) + panel * 64 * Tile::kPanelBytes, &args.q_map, full,
                            panel * Tile::kPanelCols, first_row + 64 * w, rows, ptx::kEvictFirst);
      }
    }
  }

  __device__ __forceinline__ void run_q() {
    const auto work_ring = smem.work_ring();
    for (;; ++tiles) {
      work_ring.wait_full(tiles);
      const FwdWork work = smem.slot(tiles).work;
      ptx::mbarrier_arrive(work_ring.empty(tiles));
      if (work.q_block < 0) return;
      load_q(work);
    }
  }

  __device__ __forceinline__ void run() {
    const FwdParams& p = args.params;
    const auto work_ring = smem.work_ring();
    const int group = p.num_heads_q / p.num_heads_kv;
    for (;; ++tiles) {
      work_ring.wait_full(tiles);
      const auto& slot = smem.slot(tiles);
      const FwdWork w = slot.work;
      const int begin = slot.kv_begin, end = slot.kv_end;
      ptx::mbarrier_arrive(work_ring.empty(tiles));
      if (w.q_block < 0) return;
      const bool empty = end <= begin;
      idle = Tile::kWarpgroups - warpgroups_with_rows<Tile>(args, w);
      const MapRows kv =
          locate<Tile>(args.kv_rows, w.kv_row0, w.seqlen_kv, w.head / group, w.batch);
      if (!empty) {
        load_k(end - 1, kv);
        load_bias(w, end - 1);
      }
      if (!Tile::kLoadsQApart) load_q(w);
      // The ring still holds blocks to compute while the next tile is drawn.
      if (end - begin < 2) ptx::mbarrier_arrive(smem.draw_barrier());
#pragma unroll 1
      for (int kv_block = end - 2; kv_block >= begin; --kv_block) {
        if (kv_block == begin) ptx::mbarrier_arrive(smem.draw_barrier());
        load_turn(kv_block, kv);
        load_bias(w, kv_block);
      }
      if (!empty) load_v(begin, kv);
    }
  }
};

}  // namespace flash_cuda::sm90
