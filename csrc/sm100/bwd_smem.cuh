// Shared memory of the backward kernel: operand tiles and barriers.
#pragma once

#include "ptx/cluster.h"
#include "ptx/fence.h"
#include "ptx/mbarrier.h"
#include "ptx/smem_addr.h"
#include "sm100/arrive.cuh"
#include "sm100/bwd_args.h"
#include "sm100/bwd_tile.h"

namespace flash_cuda::sm100 {

struct alignas(8) BwdExchange {
  BwdTask task;
  uint32_t tmem;  // start of the allocated columns
};

// Rings have a barrier a stage (a pair: one for rows, one for columns); the others complete a phase
// for each block of queries, and the last ones once.
enum BwdBarrier : int {
  kBwdQFull = 0,      // ring: the copy engine -> MMA
  kBwdQEmpty = 2,     // ring: MMA -> load: dK is done
  kBwdDoutFull = 4,   // ring: the copy engine -> MMA
  kBwdDoutEmpty = 6,  // ring: MMA -> load: dP and dV are done
  kBwdStatsFull = 8,  // ring: the copy engine -> scores: lse and delta
  kBwdSFull = 10,     // MMA -> scores
  kBwdPReady,         // scores -> MMA: P is stored, S has been read
  kBwdDpFull,         // MMA -> scores; dS of the block before has been read
  kBwdDsReady,        // scores -> MMA: dS is stored, in tensor and in shared memory
  kBwdDqFull,         // MMA -> reduce
  kBwdDqEmpty,        // reduce -> MMA: dQ is in registers
  kBwdKFull,          // the copy engine -> MMA
  kBwdVFull,
  kBwdDvFull,  // MMA -> scores: complete, and dO's memory is free
  kBwdDkFull,  // the same of dK and Q
  kBwdBarriers,
  // Of a pair.
  kBwdArrived = kBwdBarriers,  // the peer -> relay: its part of dS is there
  kBwdExchanged,               // scores and relays -> MMA: dS of both blocks is complete
  kBwdKColsFull,               // the copy engine -> MMA
  kBwdPairBarriers,
};

template <class Tile>
struct BwdSmem {
  uint32_t base;
  BwdExchange* exchange;

  static constexpr int kBarriersAt = Tile::kSmemExchange + sizeof(BwdExchange);
  static constexpr int kBarriers = Tile::kPair ? kBwdPairBarriers : kBwdBarriers;
  static_assert(sizeof(BwdExchange) % 8 == 0);
  static_assert(kBarriersAt + 8 * kBarriers <= Tile::kSmemBytes);

  __device__ __forceinline__ const BwdTask& task() const { return exchange->task; }
  __device__ __forceinline__ uint32_t k() const { return base + Tile::kSmemK; }
  __device__ __forceinline__ uint32_t v() const { return base + Tile::kSmemV; }
  __device__ __forceinline__ uint32_t q(uint32_t stage) const {
    return base + Tile::kSmemQ + stage * Tile::kBytesQK;
  }
  __device__ __forceinline__ uint32_t dout(uint32_t stage) const {
    return base + Tile::kSmemDout + stage * Tile::kBytesV;
  }
  __device__ __forceinline__ uint32_t ds() const { return base + Tile::kSmemDs; }
  __device__ __forceinline__ uint32_t k_columns() const { return base + Tile::kSmemKCols; }
  __device__ __forceinline__ uint32_t outgoing() const { return base + Tile::kSmemOutgoing; }
  __device__ __forceinline__ uint32_t lse(uint32_t stage) const {
    return base + Tile::kSmemLse + stage * Tile::kBlockQ * 4;
  }
  __device__ __forceinline__ uint32_t delta(uint32_t stage) const {
    return base + Tile::kSmemDelta + stage * Tile::kBlockQ * 4;
  }
  __device__ __forceinline__ uint32_t piece(int warp, uint32_t buffer) const {
    return base + Tile::kSmemDq + (warp * Tile::kPieceBuffers + buffer) * Tile::kPieceBytes;
  }
  __device__ __forceinline__ uint32_t barrier(BwdBarrier which, uint32_t stage = 0) const {
    return base + kBarriersAt + 8 * (which + stage);
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarpsScores = 8, kWarpsReduce = 4, kBlocks = Tile::kPair ? 2 : 1;
    for (int i = 0; i < kBarriers; ++i) {
      const bool by_scores = i == kBwdPReady || i == kBwdDsReady;
      int count = by_scores          ? kWarpsScores * kBlocks
                  : i == kBwdDqEmpty ? kWarpsReduce * kBlocks
                                     : 1;
      // Of each block: four warps with its own queries, and a relay.
      if (Tile::kPair && i == kBwdExchanged) count = kBlocks * (4 + 1);
      ptx::mbarrier_init(barrier(kBwdQFull, i), count);
    }
    ptx::fence_mbarrier_init();
  }

  // A warp's arrival on a barrier that the issuing thread waits for; with a pair it is the
  // leader's.
  __device__ __forceinline__ void tell_issuer(BwdBarrier which) const {
    if constexpr (Tile::kPair) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_cluster(ptx::mapa(barrier(which), 0));
    } else {
      arrive_warp(barrier(which));
    }
  }
};

// Where block `count` of the loop lies in a ring of kStages, and the phase of its barriers.
template <int kStages>
struct RingPlace {
  uint32_t count;
  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return count / kStages % 2; }
};

}  // namespace flash_cuda::sm100
