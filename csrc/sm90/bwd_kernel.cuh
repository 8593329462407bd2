// Backward attention with TMA and wgmma (Hopper).
//
// A task is kBlockKV keys of one KV head. Its K and V stay in shared memory and its dK and dV in
// registers while Q and dO of every query head of the group stream past in blocks of kBlockQ rows.
// Scores are computed transposed (S^T = K Q^T, dP^T = V dO^T), so that P^T and dS^T come out of the
// accumulators as the register operand of dV += P^T dO and dK += dS^T Q; only dS passes through
// shared memory, for dQ += dS K.
//
// Thread blocks are persistent: the operands of the next task are loaded during the last steps of
// one (K has two buffers at head dims 64 and 128), and its first GEMMs run while the store warps
// write dV and dK.
//
// Warpgroup 0: warp 0 loads (TMA), warps 1 and 2 in turns add dQ to the float32 workspace (bulk
// reduce) and store dV and dK, warp 3 draws tasks. Warpgroups 1 and 2: 64 keys each, and one half
// of dQ each.
//
// Two things order the loop (docs/kernels/sm90_bwd.md has the timeline): lse is in registers before
// the score GEMMs are issued, because shared-memory reads starve behind them, and the accumulators
// of dP start at -delta, which saves the subtraction.
#pragma once

#include "ptx/fence.h"
#include "ptx/setmaxnreg.h"
#include "ptx/smem_addr.h"
#include "sm90/bwd_consumer.cuh"
#include "sm90/bwd_producer.cuh"

namespace flash_cuda::sm90 {

template <class Tile, DType kDType, bool kGeneral>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdMaps maps, const __grid_constant__ BwdArgs args,
               const __grid_constant__ BwdRowMaps row_maps) {
  using Smem = BwdSmem<Tile>;
  extern __shared__ __align__(1024) uint8_t smem_ptr[];
  const uint32_t smem = ptx::smem_addr(smem_ptr);
  if (threadIdx.x == 0) {
    BwdBarriers<Tile>{smem + Smem::kBarriers}.init(args.bias_write == BiasAccess::kTiles);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0)
        bwd_load<Tile, kConverts<Tile, kGeneral>>(args, maps, row_maps, smem, smem_ptr);
    } else if (warp <= 2) {
      BwdStore<Tile, kConverts<Tile, kGeneral>>{args, row_maps, smem, smem_ptr, warp - 1}.run(maps);
    } else {
      bwd_draw<Tile, kShares<Tile, kGeneral>>(args, smem, smem_ptr);
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    BwdConsumer<Tile, kDType, kGeneral> consumer{
        args, maps, smem, smem_ptr, warpgroup - 1, static_cast<int>(threadIdx.x % 128)};
    consumer.run();
  }
}

}  // namespace flash_cuda::sm90
