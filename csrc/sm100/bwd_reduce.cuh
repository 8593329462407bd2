// Warpgroup that adds dQ to the float32 sums in global memory.
//
// A warp has 32 rows of dQ, which it loads in the layout of an mma accumulator: the sums are in
// that order, so that 16 rows are one stretch of memory for the copy engine.
#pragma once

#include "ptx/fence.h"
#include "ptx/red.h"
#include "ptx/tcgen05.h"
#include "ptx/tma.h"
#include "sm100/bwd_smem.cuh"

namespace flash_cuda::sm100 {

template <class Tile>
struct Reduce {
  static constexpr int kRows = 16;  // of a batch
  // Of a pair a warp has the columns of its lanes only.
  static constexpr int kBatchesRow = Tile::kPair ? 1 : Tile::kHeadDim / Tile::kBatchCols;
  static constexpr int kBatches = 2 * kBatchesRow;
  static constexpr int kBatchStride = kRows * (Tile::kPair ? Tile::kHeadDim : Tile::kBatchCols);
  static constexpr int kValues = kRows * Tile::kBatchCols / 32;  // of a lane

  const BwdSmem<Tile>& smem;
  const BwdArgs& args;
  const int warp;  // of four
  uint32_t pieces = 0;

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void load(uint32_t (&v)[kValues], int batch) {
    const uint32_t from = Tile::kTmemDq + batch % kBatchesRow * Tile::kBatchCols +
                          ((warp * 32 + batch / kBatchesRow * kRows) << 16);
#pragma unroll
    for (int c = 0; c < Tile::kBatchCols; c += 32) {
      ptx::tcgen05_ld_16x256b_x4(v + c / 2, from + c);
    }
    ptx::tcgen05_wait_ld();
    ptx::tcgen05_loaded(v);
  }

  // A batch, in pieces through this warp's buffers.
  __device__ __forceinline__ void add(const uint32_t (&v)[kValues], float* sums) {
    constexpr int kGroups = Tile::kPieceCols / 8;  // of four values a lane
#pragma unroll
    for (int piece = 0; piece < Tile::kBatchCols / Tile::kPieceCols; ++piece, ++pieces) {
      const uint32_t buffer = smem.piece(warp, pieces % Tile::kPieceBuffers);
      if (lane() == 0) ptx::bulk_wait_group_read<Tile::kPieceBuffers - 1>();
      __syncwarp();
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const uint32_t* from = v + (piece * kGroups + g) * 4;
        ptx::store_shared_16(buffer + g * 512 + lane() * 16, {from[0], from[1], from[2], from[3]});
      }
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane() == 0) {
        ptx::bulk_reduce_add_f32(sums + piece * (Tile::kPieceBytes / 4), buffer, Tile::kPieceBytes,
                                 ptx::kEvictLast);
        ptx::bulk_commit_group();
      }
    }
  }

  // Where this warp adds: its first sum of a tile, and its part of those that are added to in turn.
  __device__ __forceinline__ int first_sum() const {
    if (!Tile::kPair) return warp * 32 * Tile::kHeadDim;
    const int row = ptx::cluster_block_rank() * 64 + warp % 2 * 32, column = warp / 2 * 64;
    return row * Tile::kHeadDim + column * kRows;
  }
  __device__ __forceinline__ int part() const {
    return Tile::kPair ? ptx::cluster_block_rank() * 4 + warp : warp;
  }

  // Deterministic mode: a warp adds to the same rows in every tile of keys, so turns are kept by
  // the warp.
  __device__ __forceinline__ void wait_turn(const int* turn, int mine) const {
    if (lane() == 0) {
      while (ptx::load_acquire(turn) != mine) __nanosleep(32);
      ptx::fence_proxy_async_global();  // the copy engine adds after what the others' added
    }
    __syncwarp();
  }
  __device__ __forceinline__ void pass_turn(int* turn, int mine) const {
    if (lane() == 0) {
      ptx::bulk_wait_group<0>();
      ptx::fence_proxy_async_global();
      ptx::store_release(turn, mine + 1);
    }
  }

  __device__ __forceinline__ void run() {
    const BwdTask& task = smem.task();
    const BwdWorkspace& ws = args.workspace;
    if (!ws.dq) return;
    const int first = first_sum(), mine = part();
    constexpr int kKeys = Tile::kPair ? 2 * Tile::kBlockKV : Tile::kBlockKV;
    uint32_t count = 0;
#pragma unroll 1
    for (BwdSteps at(task); at.left > 0; at.next(), ++count) {
      const int64_t tile = at.head * ws.tiles + task.tile_base + at.q_block;
      float* sums = ws.dq + tile * (Tile::kBlockQ * Tile::kHeadDim) + first;
      int* turn = ws.turn ? ws.turn + tile * ws.turns + mine : nullptr;
      ptx::mbarrier_wait(smem.barrier(kBwdDqFull), count % 2);
      ptx::tcgen05_fence_after_thread_sync();
      // The first pieces find their buffers free, so that dQ's columns are soon free, too.
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        uint32_t v[kValues];
        load(v, batch);
        if (batch + 1 == kBatches) {
          ptx::tcgen05_fence_before_thread_sync();
          smem.tell_issuer(kBwdDqEmpty);
        } else if (turn && batch == 0) {
          wait_turn(turn, task.turn<kKeys>(at.q_block));
        }
        add(v, sums + batch * kBatchStride);
      }
      if (turn) pass_turn(turn, task.turn<kKeys>(at.q_block));
    }
    if (lane() == 0) {
      ptx::bulk_wait_group<0>();
    }
  }
};

}  // namespace flash_cuda::sm100
