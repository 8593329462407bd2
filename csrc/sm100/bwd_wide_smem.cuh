// Shared memory of the backward for head dims up to 256: operand tiles and barriers.
#pragma once

#include "ptx/cluster.h"
#include "ptx/fence.h"
#include "ptx/mbarrier.h"
#include "sm100/bwd_wide_args.h"
#include "sm100/bwd_wide_tile.h"

namespace flash_cuda::sm100 {

struct alignas(8) BwdWideExchange {
  BwdWideTask task;
  uint32_t tmem;  // start of the allocated columns
};

// Operands come in twos: those of S, and those of dP (dV). Barriers that the issuing thread waits
// for are the leader's; commits arrive in both blocks.
enum BwdWideBarrier : int {
  kWideStayFull = 0,      // 2: the copy engine -> MMA
  kWideRowsFull = 2,      // 2: the same
  kWideRowsEmpty = 4,     // 2: MMA -> load: S, dP are done
  kWideColumnsFull = 6,   // 2: the copy engine -> MMA
  kWideColumnsEmpty = 8,  // 2: MMA -> load and scores: the gradient of dS, of P is done
  kWideStatsFull = 10,    // ring: the copy engine -> scores: lse and delta
  kWideSFull = 12,        // MMA -> scores
  kWidePReady,            // scores -> MMA: S has been read, P is stored
  kWideDpFull,            // MMA -> scores
  kWideDsReady,           // scores -> MMA: dP has been read, dS is stored
  kWideDone,              // MMA -> scores: gradients are complete, all memory is free
  kWideBarriers,
};

template <class Tile>
struct BwdWideSmem {
  uint32_t base;
  BwdWideExchange* exchange;

  static constexpr int kBarriersAt = Tile::kSmemExchange + sizeof(BwdWideExchange);
  static_assert(sizeof(BwdWideExchange) % 8 == 0);
  static_assert(kBarriersAt + 8 * kWideBarriers <= Tile::kSmemBytes);

  __device__ __forceinline__ const BwdWideTask& task() const { return exchange->task; }
  __device__ __forceinline__ uint32_t stay(int which) const {
    return base + Tile::kSmemStay + which * Tile::kTileBytes;
  }
  __device__ __forceinline__ uint32_t rows(int which) const {
    return base + Tile::kSmemRows + which * Tile::kTileBytes;
  }
  __device__ __forceinline__ uint32_t columns(int which) const {
    return base + Tile::kSmemColumns + which * Tile::kTileBytes;
  }
  __device__ __forceinline__ uint32_t p() const { return base + Tile::kSmemP; }
  __device__ __forceinline__ uint32_t ds() const { return base + Tile::kSmemDs; }
  __device__ __forceinline__ uint32_t lse(uint32_t stage) const {
    return base + Tile::kSmemLse + stage * Tile::kBlock * 4;
  }
  __device__ __forceinline__ uint32_t delta(uint32_t stage) const {
    return base + Tile::kSmemDelta + stage * Tile::kBlock * 4;
  }
  __device__ __forceinline__ uint32_t barrier(BwdWideBarrier which, int i = 0) const {
    return base + kBarriersAt + 8 * (which + i);
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < kWideBarriers; ++i) {
      const bool by_warps = i == kWidePReady || i == kWideDsReady;
      ptx::mbarrier_init(barrier(kWideStayFull, i), by_warps ? 2 * Tile::kScoresWarps : 1);
    }
    ptx::fence_mbarrier_init();
  }
  // A warp's arrival on a barrier of the leader.
  __device__ __forceinline__ void tell_issuer(BwdWideBarrier which) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_cluster(ptx::mapa(barrier(which), 0));
  }
};

}  // namespace flash_cuda::sm100
