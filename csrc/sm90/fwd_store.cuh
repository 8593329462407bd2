// End of a tile: O is scaled, staged in shared memory and written by the copy engine; lse.
#pragma once

#include "ptx/griddep.h"
#include "sm90/fwd_ahead.cuh"
#include "sm90/fwd_kernel.cuh"
#include "sm90/fwd_tail.cuh"

namespace flash_cuda::sm90 {

template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::end_rows(RowEnd (&ends)[2]) {
  const FwdWork& work = this->work();
  const float sink = args.params.sink ? args.params.sink[work.head] : -INFINITY;
  const int row = lane_row();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool used = Tile::has(kDense) || row + 8 * r < work.seqlen_q;
    const float sum = quad_sum(rows.sum[r]);
    ends[r] =
        row_end<Tile::has(kGeneral)>(rows.reference[r], used ? sum : 0.f, used ? sink : -INFINITY);
  }
  if ((lane() & 3) == 0) {
    float* lse = args.params.lse + work.batch * args.params.lse_batch_stride +
                 work.head * args.params.lse_head_stride + work.q_row0;
    if (row < work.seqlen_q_slot) lse[row] = ends[0].lse;
    if (row + 8 < work.seqlen_q_slot) lse[row + 8] = ends[1].lse;
  }
}

template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::store_tile(const RowEnd (&ends)[2]) {
  constexpr int kChunks = Tile::kOutCols / 16;
  const int row = warp_row() + (lane() & 15);
#pragma unroll
  for (int part = 0; part < Tile::kOutParts; ++part) {
    [[maybe_unused]] const uint32_t count = tiles * Tile::kOutParts + part;
    // The copy before, of the previous tile or part, has read the staging memory.
    if constexpr (Tile::kStoresApart) {
      smem.out_ring(warpgroup).wait_empty(count);
    } else {
      if (thread == 0) ptx::bulk_wait_group_read<0>();
      ptx::named_barrier_sync(kStagingFree + warpgroup, 128);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float* const values = &o[8 * (part * kChunks + c)];
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        packed[i] = ptx::pack<kDType>(values[2 * i] * ends[i & 1].factor,
                                      values[2 * i + 1] * ends[i & 1].factor);
      }
      ptx::stmatrix_x4(smem.out(warpgroup) + c / kStepsPanel * (64 * kPanelBytes) +
                           swizzled(row, c % kStepsPanel * 2 + (lane() >> 4)),
                       packed);
    }
    ptx::fence_proxy_async_shared();
    if constexpr (Tile::kStoresApart) {
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(smem.out_ring(warpgroup).full(count));
    } else {
      ptx::named_barrier_sync(kStagingFull + warpgroup, 128);
      if (thread == 0) {
        const FwdWork& work = this->work();
        store_part(
            smem, args, warpgroup, part, own_row(),
            locate<Tile>(args.out_rows, work.q_row0, work.seqlen_q_slot, work.head, work.batch));
      }
    }
  }
}

// No row of the tile sees a key: zeros, straight to global memory.
template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::store_empty() {
  const FwdParams& prm = args.params;
  const FwdWork& work = this->work();
  // Every warp sees every phase of Q's barrier, before it is released.
  smem.q_ring(warpgroup).wait_full(tiles);
  release_q();
  const int own_q0 = own_row();
  const int num_rows = min(64, work.seqlen_q_slot - own_q0);
  const int chunks = prm.head_dim_v / 8;
  auto* out = static_cast<uint16_t*>(prm.out) + work.head * prm.out_stride.head +
              (prm.cu_seqlens_q ? 0 : work.batch * prm.out_stride.batch);
  float* lse = prm.lse + work.batch * prm.lse_batch_stride + work.head * prm.lse_head_stride;
#pragma unroll 1
  for (int i = thread; i < num_rows * chunks; i += 128) {
    const int64_t row = work.q_row0 + own_q0 + i / chunks;
    *reinterpret_cast<uint4*>(out + row * prm.out_stride.row + i % chunks * 8) = uint4{};
    if (i % chunks == 0) {
      lse[row] = prm.sink && own_q0 + i / chunks < work.seqlen_q ? prm.sink[work.head] : -INFINITY;
    }
  }
}

// No row of the tile is this warpgroup's. With turns the loader gives up K and V in its place, and
// no phase of theirs is mistaken for another later: the next Q comes after all K of this tile, the
// next turn after all V.
template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::pass_over(const FwdWalk& walk) {
  smem.q_ring(warpgroup).wait_full(tiles);
  release_q();
  const int count = max(walk.skip_right + walk.end - walk.begin + walk.skip_left, 0);
  if constexpr (Tile::kLooksAhead) {
    if (count) skip_k<false>(count + 1);
  } else {
    blocks += count;
  }
}

template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::run() {
  if (Tile::has(kPingPong) && warpgroup == Tile::kWarpgroups - 1) {
    ptx::named_barrier_arrive(kTurn, 256);
  }
  const auto ring = smem.work_ring();
  for (;; ++tiles) {
    ring.wait_full(tiles);
    if (uniform(work().q_block) < 0) break;
    const FwdWalk walk = this->walk();
    const int with_rows = uniform(warpgroups_with_rows<Tile>(args, work()));
    next_turn = kTurn + (warpgroup + 1 < with_rows ? warpgroup + 1 : 0);
    if (Tile::has(kRagged) && warpgroup >= with_rows) {
      pass_over(walk);
    } else if (!Tile::has(kDense) && walk.is_empty()) {
      store_empty();
    } else {
      first_block(walk);
      other_blocks(walk);
      finish_tile(walk);
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(ring.empty(tiles));
  }
  if (Tile::has(kPingPong) && warpgroup == 0) ptx::named_barrier_sync(kTurn, 256);
  // The copy engine still reads this block's shared memory.
  if (!Tile::kStoresApart && thread == 0) ptx::bulk_wait_group<0>();
}

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs args) {
  extern __shared__ uint8_t smem_raw[];
  const uint32_t dynamic = (ptx::smem_addr(smem_raw) + 1023) & ~1023u;
  const FwdSmem<Tile> smem{Tile::kLooksAhead && !Tile::has(kPair) ? Tile::kSmemBase : dynamic};
  // Above 24 bits an address has the block's place in its cluster, so it is no constant in a pair.
  if (Tile::kLooksAhead && dynamic % (1 << 24) > Tile::kSmemBase) __trap();
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();
  if constexpr (Tile::has(kPair)) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  // The kernel before may still run: it may write the inputs, read what lies where the outputs go,
  // and draw from the same tile counter. So every role waits first.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Tile::kRegistersProducer>();
    if (threadIdx.x == 0) {
      ptx::tma_prefetch_map(&args.q_map);
      ptx::tma_prefetch_map(&args.k_map);
      ptx::tma_prefetch_map(&args.v_map);
      ptx::tma_prefetch_map(&args.out_map);
      if (Tile::has(kGeneral) && args.bias_rows) ptx::tma_prefetch_map(&args.bias_map);
      ptx::griddep_wait();
      Loader<Tile>{smem, args}.run();
    } else if (threadIdx.x / 32 == 1) {
      ptx::griddep_wait();
      if constexpr (Tile::has(kPair)) {
        if (threadIdx.x == 32) schedule_pairs(smem, args);
      } else if (Tile::has(kPacked) || (!Tile::has(kDense) && args.params.cu_seqlens_q)) {
        schedule_packed(smem, args);
      } else if (threadIdx.x == 32) {
        if constexpr (Tile::has(kShareTail)) {
          schedule_shared(smem, args);
        } else {
          schedule_dense(smem, args);
        }
      }
    } else if (Tile::kLoadsQApart && threadIdx.x == 32 * kQWarp) {
      ptx::griddep_wait();
      Loader<Tile>{smem, args}.run_q();
    } else if (Tile::kStoresApart && threadIdx.x % 32 == 0) {
      ptx::griddep_wait();
      store_tiles(smem, args, static_cast<int>(threadIdx.x) / 32 - kFirstStoreWarp);
    }
  } else {
    ptx::setmaxnreg_inc<Tile::kRegistersConsumer>();
    ptx::griddep_wait();
    const int thread = threadIdx.x % 128;
    Consumer<Tile, kDType>{smem, args, warpgroup - 1, thread}.run();
  }
  if constexpr (Tile::has(kPair)) {  // the other block may still arrive at barriers of this one
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace flash_cuda::sm90
