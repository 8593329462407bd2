// Forward attention with tcgen05 (Blackwell).
//
// A block computes Tile::kBlockQ rows of O at a time: two tiles of 128 query rows (one, where the
// head dim of V is over 128) against blocks of 128 keys, from last to first. S, P and O live in
// tensor memory. One thread issues all products, S of one Q tile while the softmax of the other
// runs; a warpgroup for each Q tile turns S into P, a row a thread; the correction warpgroup scales
// O when a row's reference has moved, and ends the tile. Single warps load, store and take the next
// tile. docs/kernels/sm100_fwd.md has the timeline and what each barrier says.
#pragma once

#include "common/tma_rows.cuh"
#include "ptx/cluster_launch.h"
#include "ptx/elect.h"
#include "ptx/fence.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tcgen05.h"
#include "ptx/tma.h"
#include "sm100/block.cuh"
#include "sm100/fwd_args.h"
#include "sm100/fwd_correction.cuh"
#include "sm100/fwd_smem.cuh"
#include "sm100/fwd_softmax.cuh"

namespace flash_cuda::sm100 {

// ---- scheduler: one warp

// Publishes this block's tile, then those of blocks that have not started, each when the last K of
// the tile before it is on its way: others may be free sooner.
template <class Tile>
__device__ __forceinline__ void schedule(const FwdSmem<Tile>& smem, const FwdArgs& args) {
  const auto ring = smem.work_ring();
  const int lane = threadIdx.x % 32;
  const FwdParams& p = args.params;
  PackedTiles packed{p, Tile::kBlockQ, lane};
  const int num_tiles = p.cu_seqlens_q ? packed.count() : args.num_tiles;
  const uint32_t answer = ptx::smem_addr(smem.exchange->answer);
  int index = blockIdx.x;
  for (uint32_t tiles = 0;; ++tiles) {
    FwdWork work;
    work.q_block = -1;
    if (index >= 0 && index < num_tiles) {
      work =
          p.cu_seqlens_q ? packed.find(index) : dense_work(p, args.q_blocks, args.section, index);
    }
    if (lane == 0) {
      ring.wait_empty(tiles);
      smem.exchange->work[ring.stage(tiles)] = work;
      ptx::mbarrier_arrive(ring.full(tiles));
      if (work.q_block >= 0) {
        ptx::mbarrier_wait(smem.barrier(kNearEnd), tiles % 2);
        ptx::mbarrier_arrive_expect_tx(smem.barrier(kAnswer), 16);
        ptx::cluster_launch_try_cancel(answer, smem.barrier(kAnswer));
        ptx::mbarrier_wait(smem.barrier(kAnswer), tiles % 2);
        index = ptx::cluster_launch_answer(answer);
        ptx::fence_proxy_async_shared();  // the next answer overwrites this one
      }
    }
    __syncwarp();
    if (work.q_block < 0) return;
    index = __shfl_sync(~0u, index, 0);
  }
}

// ---- load: one thread

template <class Tile>
struct Loader {
  const FwdSmem<Tile>& smem;
  const FwdArgs& args;
  uint32_t panels = 0;  // through the ring

  template <int kPanels>
  __device__ __forceinline__ void load_block(const CUtensorMap* map, int kv_block,
                                             const MapRows& rows) {
    const auto ring = smem.ring();
#pragma unroll
    for (int i = 0; i < kPanels; ++i, ++panels) {
      ring.wait_empty(panels);
      ptx::mbarrier_arrive_expect_tx(ring.full(panels), Tile::kPanelBytes);
      load_rows(ring.panel(panels), map, ring.full(panels), i * Tile::kPanelCols,
                kv_block * Tile::kBlockKV, rows, ptx::kEvictLast);
    }
  }
  __device__ __forceinline__ void load_q(int tile, int first_row, uint32_t used,
                                         const MapRows& rows) {
    const uint32_t full = smem.barrier(kQFull, tile);
    ptx::mbarrier_wait(smem.barrier(kQEmpty, tile), used % 2 ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Tile::kQTileBytes);
#pragma unroll
    for (int i = 0; i < Tile::kPanelsQK; ++i) {
      load_rows(smem.q(tile) + i * Tile::kPanelBytes, &args.q_map, full, i * Tile::kPanelCols,
                first_row + 128 * tile, rows, ptx::kEvictFirst);
    }
  }

  __device__ __forceinline__ void run() {
    const FwdParams& p = args.params;
    const int group = p.num_heads_q / p.num_heads_kv;
    uint32_t used = 0;  // tiles of work with keys
    for (uint32_t tiles = 0;; ++tiles) {
      const FwdWork w = smem.take_work(tiles, false);
      if (w.q_block < 0) return;
      const BlockRange range = blocks_of<Tile>(p, w);
      if (range.end <= range.begin) {
        ptx::mbarrier_arrive(smem.barrier(kNearEnd));
        continue;
      }
      const MapRows q = args.q_rows.locate(w.q_row0, w.seqlen_q, w.head, w.batch);
      const MapRows kv = args.kv_rows.locate(w.kv_row0, w.seqlen_kv, w.head / group, w.batch);
      const auto load_k = [&](int kv_block) {
        load_block<Tile::kPanelsQK>(&args.k_map, kv_block, kv);
        if (kv_block == range.begin) ptx::mbarrier_arrive(smem.barrier(kNearEnd));
      };
      load_k(range.end - 1);
#pragma unroll
      for (int t = 0; t < Tile::kTilesQ; ++t) load_q(t, w.q_block * Tile::kBlockQ, used, q);
      ++used;
      // With one Q tile S runs a block ahead, so V comes a block later.
#pragma unroll 1
      for (int b = range.end - 1; b > range.begin; --b) {
        if (Tile::kTilesQ == 2) load_block<Tile::kPanelsV>(&args.v_map, b, kv);
        load_k(b - 1);
        if (Tile::kTilesQ == 1) load_block<Tile::kPanelsV>(&args.v_map, b, kv);
      }
      load_block<Tile::kPanelsV>(&args.v_map, range.begin, kv);
    }
  }
};

// ---- MMA: one thread

template <class Tile, DType kDType>
struct Issuer {
  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  static constexpr uint64_t kDescQK = ptx::tcgen05_desc_base(16, 8 * 128, ptx::kTcgen05Swizzle128);
  static constexpr uint64_t kDescV =
      ptx::tcgen05_desc_base(Tile::kPanelBytes, 8 * 128, ptx::kTcgen05Swizzle128);
  static constexpr uint32_t kInstructionQK =
      ptx::tcgen05_f16_instruction(kBf16, false, false, 128, 128);
  static constexpr uint32_t kInstructionPV =
      ptx::tcgen05_f16_instruction(kBf16, false, true, 128, Tile::kGroupColsV);
  // P is handed over in two parts; in steps of 16 keys.
  static constexpr int kStepsReady = 6, kSteps = 8;

  const FwdSmem<Tile>& smem;
  const FwdArgs& args;
  uint32_t panels = 0;  // of the ring, up to the K or V block in turn
  uint32_t blocks = 0;  // of keys whose P V has been issued, of each Q tile
  uint32_t used = 0;    // tiles of work with keys

  // S of a Q tile. The first to use a K block waits for its panels, the last one releases them.
  // Panels are a loop, not unrolled: their addresses would not fit this warp's registers.
  __device__ __forceinline__ void issue_qk(int tile, uint32_t block, bool first, bool last) {
    constexpr int kStepsPanel = Tile::kPanelCols / 16, kStepsQK = Tile::kHeadDim / 16;
    const auto ring = smem.ring();
    const int slot = slot_of<Tile>(tile, block);
    const uint32_t s = Tile::kTmemS + slot * 128;
#pragma unroll 1
    for (int panel = 0; panel < Tile::kPanelsQK; ++panel) {
      if (first) ring.wait_full(panels + panel);
      const uint64_t a = ptx::tcgen05_desc(smem.q(tile) + panel * Tile::kPanelBytes, kDescQK);
      const uint64_t b = ptx::tcgen05_desc(ring.panel(panels + panel), kDescQK);
#pragma unroll
      for (int k = 0; k < kStepsPanel; ++k) {
        if (kStepsQK % kStepsPanel && panel * kStepsPanel + k >= kStepsQK) break;
        ptx::tcgen05_mma_ss(s, a + 2 * k, b + 2 * k, kInstructionQK, panel + k > 0);
      }
      if (last) ptx::tcgen05_commit(ring.empty(panels + panel));
    }
    ptx::tcgen05_commit(smem.barrier(kSFull, slot));
    if (last) panels += Tile::kPanelsQK;
  }

  // O += P V of a Q tile, for the block in turn.
  __device__ __forceinline__ void issue_pv(int tile, bool accumulate, bool first, bool last) {
    const auto ring = smem.ring();
    const int slot = slot_of<Tile>(tile, blocks);
    ptx::mbarrier_wait(smem.barrier(kPReady, slot), phase_of<Tile>(blocks));
    ptx::tcgen05_fence_after_thread_sync();
    if (first) {
#pragma unroll 1
      for (int panel = 0; panel < Tile::kPanelsV; ++panel) ring.wait_full(panels + panel);
    }
    issue_pv_steps<0, kStepsReady>(tile, slot, accumulate);
    ptx::mbarrier_wait(smem.barrier(kPLast, slot), phase_of<Tile>(blocks));
    ptx::tcgen05_fence_after_thread_sync();
    issue_pv_steps<kStepsReady, kSteps>(tile, slot, true);
    if (last) {
#pragma unroll 1
      for (int panel = 0; panel < Tile::kPanelsV; ++panel) {
        ptx::tcgen05_commit(ring.empty(panels + panel));
      }
      panels += Tile::kPanelsV;
    }
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void issue_pv_steps(int tile, int slot, bool accumulate) {
    const auto ring = smem.ring();
    const uint32_t p = Tile::kTmemS + slot * 128 + Tile::kTmemP;
    uint32_t o = Tile::kTmemO + tile * Tile::kHeadDimV;
#pragma unroll 1
    for (int group = 0; group < Tile::kGroupsV; ++group, o += Tile::kGroupColsV) {
      const uint64_t b = ptx::tcgen05_desc(ring.panel(panels + group * Tile::kGroupV), kDescV);
#pragma unroll
      for (int k = kFirst; k < kEnd; ++k) {
        // 16 keys are 8 columns of P, and 16 rows of 128 bytes of V.
        ptx::tcgen05_mma_ts(o, p + 8 * k, b + k * (16 * 128 / 16), kInstructionPV,
                            accumulate || k > 0);
      }
    }
  }

  __device__ __forceinline__ void wait_q(int tile) {
    ptx::mbarrier_wait(smem.barrier(kQFull, tile), used % 2);
  }
  __device__ __forceinline__ void release_q(int tile) {
    if (!Tile::kOutOverQ) ptx::tcgen05_commit(smem.barrier(kQEmpty, tile));
  }

  // Two Q tiles in turn. S of a tile may overwrite its P: the matrix unit works in order.
  __device__ __forceinline__ void two_tiles(int num_blocks) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      wait_q(t);
      issue_qk(t, blocks, t == 0, t == 1);
    }
#pragma unroll 1
    for (int i = 1; i < num_blocks; ++i, ++blocks) {
      // V of the last block and K of this one are used twice before the ring moves on.
      const uint32_t v = panels;
      issue_pv(0, i > 1, true, false);
      panels = v + Tile::kPanelsV;
      issue_qk(0, blocks + 1, true, false);
      panels = v;
      issue_pv(1, i > 1, false, true);
      issue_qk(1, blocks + 1, false, true);
    }
    release_q(0);
    release_q(1);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      issue_pv(t, num_blocks > 1, t == 0, t == 1);
      ptx::tcgen05_commit(smem.barrier(kOFull, t));
    }
    ++blocks;
  }

  // One Q tile: S of the next block is issued before O += P V of this one.
  __device__ __forceinline__ void one_tile(int num_blocks) {
    wait_q(0);
    issue_qk(0, blocks, true, true);
#pragma unroll 1
    for (int i = 0; i < num_blocks; ++i, ++blocks) {
      if (i + 1 < num_blocks) {
        issue_qk(0, blocks + 1, true, true);
      } else {
        release_q(0);
      }
      issue_pv(0, i > 0, true, true);
      ptx::tcgen05_commit(smem.barrier(kOFull, 0));
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t tiles = 0;; ++tiles) {
      const FwdWork w = smem.take_work(tiles, false);
      if (w.q_block < 0) return;
      const BlockRange range = blocks_of<Tile>(args.params, w);
      if (range.end <= range.begin) continue;
      if constexpr (Tile::kTilesQ == 2) {
        two_tiles(range.end - range.begin);
      } else {
        one_tile(range.end - range.begin);
      }
      ++used;
    }
  }
};

// ---- store: one thread

template <class Tile>
__device__ __forceinline__ void store(const FwdSmem<Tile>& smem, const FwdArgs& args) {
  uint32_t used = 0;
  for (uint32_t tiles = 0;; ++tiles) {
    const FwdWork w = smem.take_work(tiles, false);
    if (w.q_block < 0) break;
    const BlockRange range = blocks_of<Tile>(args.params, w);
    if (range.end <= range.begin) continue;
    const MapRows at = args.out_rows.locate(w.q_row0, w.seqlen_q_slot, w.head, w.batch);
#pragma unroll
    for (int t = 0; t < Tile::kTilesQ; ++t) {
      ptx::mbarrier_wait(smem.barrier(kOutFull, t), used % 2);
#pragma unroll
      for (int i = 0; i < Tile::kPanelsV; ++i) {
        store_rows(&args.out_map, smem.out(t) + i * Tile::kPanelBytes, i * Tile::kPanelCols,
                   w.q_block * Tile::kBlockQ + 128 * t, at);
      }
      ptx::bulk_commit_group();
    }
    // The staging memory is free once the copy engine has read it.
#pragma unroll
    for (int t = 0; t < Tile::kTilesQ; ++t) {
      if (Tile::kTilesQ == 2 && t == 0) {
        ptx::bulk_wait_group_read<1>();
      } else {
        ptx::bulk_wait_group_read<0>();
      }
      ptx::mbarrier_arrive(smem.barrier(kOutEmpty, t));
      if (Tile::kOutOverQ) ptx::mbarrier_arrive(smem.barrier(kQEmpty, t));
    }
    ++used;
  }
  ptx::bulk_wait_group<0>();
}

template <class Tile, DType kDType>
__device__ __forceinline__ void single_warp(const FwdSmem<Tile>& smem, const FwdArgs& args,
                                            int warp) {
  const bool leader = ptx::elect_one();
  if (warp == 0 && leader) {
    Issuer<Tile, kDType>{smem, args}.run();
  } else if (warp == 1 && leader) {
    store(smem, args);
  } else if (warp == 2 && leader) {
    ptx::tma_prefetch_map(&args.q_map);
    ptx::tma_prefetch_map(&args.k_map);
    ptx::tma_prefetch_map(&args.v_map);
    ptx::tma_prefetch_map(&args.out_map);
    Loader<Tile>{smem, args}.run();
  } else if (warp == 3) {
    schedule(smem, args);
  }
}

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs args) {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  const FwdSmem<Tile> smem{ptx::smem_addr(smem_raw),
                           reinterpret_cast<FwdExchange*>(smem_raw + Tile::kSmemBarriers)};
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  constexpr int kMmaWarp = 4 * (Tile::kTilesQ + 1);
  begin_block<1>(smem, warp, kMmaWarp, Tile::kTmemColumns);
  const int warpgroup = warp / 4;
  if (warpgroup < Tile::kTilesQ) {
    ptx::setmaxnreg_inc<Tile::kRegistersSoftmax>();
    Softmax<Tile, kDType>{smem, args, warpgroup}.run();
  } else if (warpgroup == Tile::kCorrectionWarpgroup) {
    ptx::setmaxnreg_dec<Tile::kRegistersCorrection>();
    Correction<Tile, kDType>{smem, args}.run();
  } else {
    ptx::setmaxnreg_dec<Tile::kRegistersOther>();
    single_warp<Tile, kDType>(smem, args, warp - kMmaWarp);
  }
  end_block<1>(smem, warp, kMmaWarp, Tile::kTmemColumns);
}

}  // namespace flash_cuda::sm100
