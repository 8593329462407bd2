// Backward attention for wide heads with TMA and wgmma (Hopper), in clusters of
// two thread blocks.
//
// A task is 128 keys of one KV head, 64 in each block. K and V stay in shared
// memory, dK and dV in registers, while Q and dO of every query head of the
// group stream past; each block loads half of them for both. dS is exchanged,
// so that each block makes half of the columns of dQ over all 128 keys: it adds
// half as much to the float32 sums.
//
// Warpgroup 0: warp 0 loads (TMA), warps 1 and 2 add dQ to the workspace (bulk
// reduce) and store dV and dK. Warpgroups 1 and 2 compute different GEMMs of
// the same keys (docs/kernels/sm90_bwd_wide.md has the order of a step).
#pragma once

#include "ptx/cluster.h"
#include "ptx/griddep.h"
#include "ptx/setmaxnreg.h"
#include "sm90/bwd_wide_consumer.cuh"

namespace flash_cuda::sm90 {

// The task of this cluster, in the shared memory of both blocks; false: there
// is none. Drawn in order, so that whatever a task waits for in deterministic
// mode is running.
template <class Tile>
__device__ __forceinline__ bool bwd_wide_draw(const BwdWideArgs& args, uint32_t smem,
                                              uint8_t* smem_ptr, uint32_t rank) {
  using Smem = BwdWideSmem<Tile>;
  BwdTask<Tile>& task = *reinterpret_cast<BwdTask<Tile>*>(smem_ptr + Smem::kTask);
  if (threadIdx.x == 0) {
    BwdWideBarriers{smem + Smem::kBarriers}.init();
    ptx::fence_mbarrier_init();
    ptx::griddep_wait();  // the pre-pass sets the counter
    if (rank == 0) {
      const int index = atomicAdd(args.base.work.next_task, 1);
      for (uint32_t r = 0; r < 2; ++r)
        ptx::store_cluster_4(ptx::mapa(smem + Smem::kIndex, r), index);
    }
  }
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x == 0) {
    bwd_task<Tile>(args.base, *reinterpret_cast<const int*>(smem_ptr + Smem::kIndex), task);
  }
  __syncthreads();
  return task.kv0 < task.kv_slot_end;  // else a spare block of a packed batch
}

template <class Tile, DType kDType, bool kGeneral>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    bwd_wide_kernel(const __grid_constant__ BwdMaps maps,
                    const __grid_constant__ BwdWideArgs args) {
  using Smem = BwdWideSmem<Tile>;
  extern __shared__ __align__(1024) uint8_t smem_ptr[];
  const uint32_t smem = ptx::smem_addr(smem_ptr);
  const uint32_t rank = ptx::cluster_block_rank();
  if (!bwd_wide_draw<Tile>(args, smem, smem_ptr, rank)) return;
  const BwdTask<Tile>& task = *reinterpret_cast<const BwdTask<Tile>*>(smem_ptr + Smem::kTask);

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) {
        ptx::griddep_wait();  // lse2 and delta come from the pre-pass
        bwd_wide_load<Tile>(args, maps, task, smem, rank);
      }
    } else if (warp <= 2) {
      ptx::griddep_wait();  // the pre-pass zeroes the sums
      const uint32_t staging = smem + Smem::kStaging;
      if (warp == 1) {
        BwdWideStore<Tile, 0>{args, task, staging, rank}.run(maps);
      } else {
        BwdWideStore<Tile, 1>{args, task, staging + Smem::kStagingBytes, rank}.run(maps);
      }
    }
    __syncwarp();
  } else {
    const int thread = threadIdx.x % 128;
    const uint32_t peer = ptx::mapa(smem, rank ^ 1) - smem;
    if (warpgroup == 1) {
      ptx::setmaxnreg_inc<248>();
      BwdWideScores<Tile, kDType, kGeneral> consumer{args, task, smem, rank, peer, thread};
      consumer.run();
    } else {
      ptx::setmaxnreg_inc<216>();
      BwdWideGradients<Tile, kDType> consumer{args, task, smem, rank, peer, thread};
      consumer.run();
    }
  }
  // The peer may still arrive here or write dS.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace flash_cuda::sm90
