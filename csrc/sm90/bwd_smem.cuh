// Shared memory and named barriers of the backward kernel.
#pragma once

#include "sm90/bwd_tile.h"
#include "sm90/bwd_work.cuh"

namespace flash_cuda::sm90 {

// Shared memory of one block, as byte offsets from a 1024-byte boundary. Operand tiles are panels
// of 64 columns, [rows][128 bytes], in the 128-byte swizzle.
template <class Tile>
struct BwdSmem {
  static constexpr int kKvBytes = Tile::kBlockKV * Tile::kPanels * 128;
  static constexpr int kQBytes = Tile::kBlockQ * Tile::kPanels * 128;
  static constexpr int kDsBytes = Tile::kBlockKV * Tile::kBlockQ * 2;
  static constexpr int kDqBytes = Tile::kBlockQ * Tile::kHeadDim * 4;
  static constexpr int kRowBytes = Tile::kBlockQ * 4;
  static constexpr int kK = 0, kV = kK + Tile::kKBuffers * kKvBytes;
  static constexpr int kQ = kV + kKvBytes, kDout = kQ + Tile::kStages * kQBytes;
  static constexpr int kDs = kDout + Tile::kStages * kQBytes;  // one buffer a stage
  // Staging of dQ, dV or dK: a warpgroup's part.
  static constexpr int kOut = kDs + Tile::kStages * kDsBytes;
  static constexpr int kOutBytes = Tile::kDqInTurns ? kDqBytes : kDqBytes / 2;
  // A tile of bias, in whose place its gradient is staged: half of it is of a warpgroup.
  static constexpr int kBiasBytes = Tile::kBiasStages > 0 ? Tile::kBlockKV * Tile::kBlockQ * 4 : 0;
  static constexpr int kBias = kOut + 2 * kOutBytes;
  static constexpr int kZeroBytes = Tile::kBiasStages > 0 || Tile::kHeadDim == 128 ? 1024 : 4096;
  static constexpr int kZeros = kBias + Tile::kBiasStages * kBiasBytes;
  static constexpr int kLse = kZeros + kZeroBytes, kDelta = kLse + Tile::kStages * kRowBytes;
  static constexpr int kBarriers = kDelta + Tile::kStages * kRowBytes;
  // Two, a ring.
  static constexpr int kTask = (kBarriers + 8 * BwdBarriers<Tile>::kCount + 15) / 16 * 16;
  static constexpr int kBytes = (kTask + 2 * sizeof(BwdTask<Tile>) + 15) / 16 * 16;
  static_assert(kBytes <= 232448, "shared memory of an SM");
};

enum BwdNamedBarrier : int {
  kDsReady = 1,    // both warpgroups have written their part of dS
  kOutFull = 2,    // + store warp: dQ, dV or dK lies in the staging buffer
  kOutEmpty = 4,   // + warpgroup: its half of the staging buffer may be rewritten
  kDsInTurns = 6,  // + stage: instead of kDsReady, only whose turn it is waits
  kBiasTile = 8,   // + warpgroup: its half of the tile has been read, or written
};

template <class Tile>
__device__ __forceinline__ BwdTask<Tile>& bwd_task_at(uint8_t* smem_ptr, int slot) {
  return reinterpret_cast<BwdTask<Tile>*>(smem_ptr + BwdSmem<Tile>::kTask)[slot];
}

}  // namespace flash_cuda::sm90
