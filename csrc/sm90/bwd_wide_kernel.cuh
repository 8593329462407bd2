// Backward attention for wide heads with TMA and wgmma (Hopper), in clusters of two thread blocks.
//
// A task is 128 keys of one KV head, 64 in each block. K and V stay in shared memory, dK and dV in
// registers, while Q and dO of every query head of the group stream past; each block loads half of
// them for both. dS is exchanged, so that each block makes half of the columns of dQ over all 128
// keys: it adds half as much to the float32 sums.
//
// Warpgroup 0: warp 0 loads (TMA), warps 1 and 2 add dQ to the workspace (bulk reduce) and store
// dV and dK. Warpgroups 1 and 2 compute different GEMMs of the same keys
// (docs/kernels/sm90_bwd_wide.md has the order of a step).
#pragma once

#include "ptx/cluster.h"
#include "ptx/griddep.h"
#include "ptx/setmaxnreg.h"
#include "sm90/bwd_wide_gradients.cuh"
#include "sm90/bwd_wide_scores.cuh"

namespace flash_cuda::sm90 {

// kGeneral: with softcap, or with ALiBi and a bias. kClipped: there may be packed sequences or used
// lengths.
template <class Tile, DType kDType, bool kGeneral, bool kClipped, WideSharing kSharing>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    bwd_wide_kernel(const __grid_constant__ BwdMaps maps,
                    const __grid_constant__ BwdWideArgs args) {
  using Smem = BwdWideSmem<Tile>;
  constexpr bool kShare = kSharing != WideSharing::kNone;
  constexpr bool kFewRegisters = kShare || Tile::kHeadDim > 192;
  extern __shared__ __align__(1024) uint8_t smem_ptr[];
  const uint32_t smem = ptx::smem_addr(smem_ptr);
  const uint32_t rank = ptx::cluster_block_rank();
  if (threadIdx.x == 0) {
    BwdWideBarriers{smem + Smem::kBarriers}.init();
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x < Smem::kZeroBytes / 16) {
    reinterpret_cast<uint4*>(smem_ptr + Smem::kZeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    ptx::fence_proxy_async_shared();
  }
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();

  // Where registers are short each role finds the peer's address for itself: kept for all warps, it
  // would be read from memory in every step.
  uint32_t kept = 0;
  if constexpr (!kFewRegisters) kept = ptx::mapa(smem, rank ^ 1) - smem;
  const auto peer = [&] {
    if constexpr (kFewRegisters) return ptx::mapa(smem, rank ^ 1) - smem;
    return kept;
  };
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) bwd_wide_load<Tile, kClipped>(args, maps, smem, smem_ptr, rank);
    } else if (warp == 1) {
      BwdWideStore<Tile, 0, kClipped>{args, smem + Smem::kStaging, rank}.run(maps, smem, smem_ptr);
    } else if (warp == 2) {
      BwdWideStore<Tile, 1, kClipped>{args, smem + Smem::kStaging, rank}.run(maps, smem, smem_ptr);
    } else {
      if (threadIdx.x % 32 == 0) bwd_wide_draw<Tile, kShare>(args, smem, smem_ptr, rank, peer());
    }
    __syncwarp();
  } else {
    const int thread = threadIdx.x % 128;
    if (warpgroup == 1) {
      ptx::setmaxnreg_inc<248>();
      BwdWideScores<Tile, kDType, kGeneral, kSharing> consumer{args, smem, rank, peer(), thread};
      consumer.run(smem_ptr);
    } else {
      ptx::setmaxnreg_inc<216>();
      BwdWideGradients<Tile, kDType, kGeneral, kSharing> consumer{args, smem, rank, peer(), thread};
      consumer.run(smem_ptr);
    }
  }
  // The peer may still arrive here or write dS.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace flash_cuda::sm90
