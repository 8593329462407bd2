// Shared memory and barriers of the backward for wide heads.
#pragma once

#include "ptx/cluster.h"
#include "ptx/mbarrier.h"
#include "sm90/bwd_wide_tile.h"
#include "sm90/bwd_work.cuh"

namespace flash_cuda::sm90 {

// Every barrier lies at the same place in both blocks. Those of the cluster count the warps of
// both: a block loads into both and writes dS into the peer.
struct BwdWideBarriers {
  uint32_t base;
  __device__ uint32_t kv_full() const { return base; }
  __device__ uint32_t q_full(int stage) const { return base + 8 + 8 * stage; }
  __device__ uint32_t q_empty(int stage) const { return base + 24 + 8 * stage; }  // of the cluster
  __device__ uint32_t dout_full(int stage) const { return base + 40 + 8 * stage; }
  __device__ uint32_t dout_empty(int stage) const { return base + 56 + 8 * stage; }  // the same
  __device__ uint32_t p_full() const { return base + 72; }
  __device__ uint32_t ds_full() const { return base + 80; }
  __device__ uint32_t ds_empty() const { return base + 88; }  // of the cluster
  __device__ uint32_t kv_empty() const { return base + 96; }
  __device__ uint32_t task_full(int slot) const { return base + 104 + 8 * slot; }
  __device__ uint32_t task_empty(int slot) const { return base + 120 + 8 * slot; }
  __device__ uint32_t near_end() const { return base + 136; }     // time to draw a task
  __device__ uint32_t index_full() const { return base + 144; }   // of the second block
  __device__ uint32_t index_empty() const { return base + 152; }  // of the first block
  __device__ uint32_t bias_full() const { return base + 160; }
  static constexpr int kCount = 21;
  static constexpr int kClusterWarps = 16;
  static constexpr int kTaskReaders = 11;  // warps
  __device__ void init() const {
    ptx::mbarrier_init(kv_full(), 1);
    for (int s = 0; s < 2; ++s) {
      ptx::mbarrier_init(q_full(s), 1);
      ptx::mbarrier_init(q_empty(s), kClusterWarps);
      ptx::mbarrier_init(dout_full(s), 1);
      ptx::mbarrier_init(dout_empty(s), kClusterWarps);
      ptx::mbarrier_init(task_full(s), 1);
      ptx::mbarrier_init(task_empty(s), kTaskReaders);
    }
    ptx::mbarrier_init(kv_empty(), 8);
    ptx::mbarrier_init(near_end(), 1);
    ptx::mbarrier_init(index_full(), 1);
    ptx::mbarrier_init(index_empty(), 1);
    ptx::mbarrier_init(bias_full(), 1);
    ptx::mbarrier_init(p_full(), 4);
    ptx::mbarrier_init(ds_full(), 4);
    ptx::mbarrier_init(ds_empty(), kClusterWarps);
  }
};

// Byte offsets from a 1024-byte boundary. Operand tiles are panels of 64 columns, [64 rows][128
// bytes], in the 128-byte swizzle.
template <class Tile>
struct BwdWideSmem {
  static constexpr int kTileBytes = Tile::kPanels * Tile::kPanelBytes;
  static constexpr int kTileBytesV = Tile::kPanelsV * Tile::kPanelBytes;
  static constexpr int kPeerBytes = Tile::kPeerPanels * Tile::kPanelBytes;
  static constexpr int kDsBytes = Tile::kKeys * Tile::kBlockQ * 2;  // of one block's keys
  static constexpr int kStagingBytes = 2 * Tile::kPanelBytes;       // of a warpgroup
  static constexpr int kRowBytes = Tile::kBlockQ * 4;
  static constexpr int kK = 0, kPeerK = kK + kTileBytes;  // the peer's keys: this block's columns
  static constexpr int kV = kPeerK + kPeerBytes, kQ = kV + kTileBytesV;
  static constexpr int kDout = kQ + Tile::kQStages * kTileBytes;
  static constexpr int kDs =
      kDout + Tile::kDoutStages * kTileBytesV;  // P, then dS of the own keys; dS of the peer's
  static constexpr int kStaging = kDs + 2 * kDsBytes;  // a buffer a warpgroup
  static constexpr int kLse = kStaging + 2 * kStagingBytes;
  static constexpr int kDelta = kLse + Tile::kQStages * kRowBytes;
  static constexpr int kZeroBytes = 1024;
  static constexpr int kZeros = kDelta + Tile::kDoutStages * kRowBytes;
  static constexpr int kBarriers = kZeros + kZeroBytes;
  static constexpr int kIndex = kBarriers + 8 * BwdWideBarriers::kCount;
  static constexpr int kTask = kIndex + 16;
  static constexpr int kBytes = (kTask + 2 * sizeof(BwdTask<Tile>) + 15) / 16 * 16;  // two, a ring
  static_assert(kBytes <= 232448, "shared memory of an SM");
};

// Where a step's tile lies in a ring of one or two, and the phase of its barriers.
template <int kStages>
struct RingStep {
  int stage;
  uint32_t phase;
  __device__ explicit RingStep(int step)
      : stage(kStages == 2 ? step & 1 : 0), phase(kStages == 2 ? step >> 1 & 1 : step & 1) {}
};

template <class Tile>
__device__ __forceinline__ BwdTask<Tile>& bwd_wide_task_at(uint8_t* smem_ptr, int slot) {
  return reinterpret_cast<BwdTask<Tile>*>(smem_ptr + BwdWideSmem<Tile>::kTask)[slot];
}

enum BwdWideNamedBarrier : int {
  kWideFull = 1,      // + warpgroup + 2 * store warp: dQ, dV or dK lies in the staging buffer
  kWideEmpty = 5,     // + warpgroup: the buffer may be rewritten
  kWideBiasRead = 7,  // a bias has been read from the buffer
  kWideJoin = 8,      // + warpgroup: the pieces of a shared task
};

}  // namespace flash_cuda::sm90
