// Correction warpgroup of the forward kernel: keeps O in step with the rows' references while a
// tile runs, divides it by the rows' sums at the end, and stages it for the copy engine.
#pragma once

#include "ptx/convert.h"
#include "ptx/fence.h"
#include "ptx/smem_addr.h"
#include "ptx/tcgen05.h"
#include "sm100/fwd_args.h"
#include "sm100/fwd_smem.cuh"

namespace flash_cuda::sm100 {

template <class Tile, DType kDType>
struct Correction {
  const FwdSmem<Tile>& smem;
  const FwdArgs& args;
  uint32_t blocks = 0, used = 0;

  __device__ __forceinline__ int thread() const { return threadIdx.x % 128; }
  __device__ __forceinline__ uint32_t o_lanes(int tile) const {
    return Tile::kTmemO + tile * Tile::kHeadDimV + ((threadIdx.x / 32 % 4) << 21);
  }

  __device__ __forceinline__ void rescale(int tile, float scale) {
    const uint32_t o = o_lanes(tile);
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int c = 0; c < Tile::kHeadDimV; c += 16) {
      uint32_t r[16];
      ptx::tcgen05_ld_x16(r, o + c);
      ptx::tcgen05_wait_ld();
      ptx::tcgen05_loaded(r);
#pragma unroll
      for (int i = 0; i < 16; ++i) r[i] = __float_as_uint(__uint_as_float(r[i]) * scale);
      ptx::tcgen05_st_x16(o + c, r);
    }
    ptx::tcgen05_wait_st();
  }

  // O / sum as 16-bit numbers to the staging memory, in the swizzle of the tensor map.
  __device__ __forceinline__ void stage(int tile, float inverse) {
    const uint32_t o = o_lanes(tile), row = thread(), to = smem.out(tile) + row * 128;
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int c = 0; c < Tile::kHeadDimV; c += 16) {
      uint32_t r[16];
      ptx::tcgen05_ld_x16(r, o + c);
      ptx::tcgen05_wait_ld();
      ptx::tcgen05_loaded(r);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float lo = __uint_as_float(r[8 * half + 2 * i]) * inverse;
          const float hi = __uint_as_float(r[8 * half + 2 * i + 1]) * inverse;
          // A row that does not count is zero, whatever V held.
          packed[i] = inverse == 0.0f ? 0u : ptx::pack<kDType>(lo, hi);
        }
        const uint32_t chunk = (c % 64) / 8 + half;
        ptx::store_shared_16(to + c / 64 * Tile::kPanelBytes + ((chunk ^ (row & 7)) << 4), packed);
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::tcgen05_fence_before_thread_sync();
  }

  __device__ __forceinline__ void run_blocks(int num_blocks) {
#pragma unroll 1
    for (int i = 0; i < num_blocks; ++i, ++blocks) {
#pragma unroll
      for (int t = 0; t < Tile::kTilesQ; ++t) {
        const int slot = slot_of<Tile>(t, blocks);
        ptx::mbarrier_wait(smem.barrier(kScaleFull, slot), phase_of<Tile>(blocks));
        const float scale = smem.exchange->scale[slot][thread()];
        if (i > 0) {
          // With two Q tiles, S of this block tells that O of the last one is complete.
          if (Tile::kTilesQ == 1) {
            ptx::mbarrier_wait(smem.barrier(kOFull, t), (blocks - 1) % 2);
          }
          if (__any_sync(~0u, scale != 1.0f)) rescale(t, scale);
        }
        ptx::tcgen05_fence_before_thread_sync();
        arrive_warp(smem.barrier(kPReady, slot));
      }
    }
  }

  __device__ __forceinline__ void end_tile() {
#pragma unroll
    for (int t = 0; t < Tile::kTilesQ; ++t) {
      ptx::mbarrier_wait(smem.barrier(kRowEnd, t), used % 2);
      const float inverse = smem.exchange->inverse[t][thread()];
      arrive_warp(smem.barrier(kRowTaken, t));
      ptx::mbarrier_wait(smem.barrier(kOFull, t), (Tile::kTilesQ == 1 ? blocks - 1 : used) % 2);
      ptx::mbarrier_wait(smem.barrier(kOutEmpty, t), used % 2 ^ 1);
      stage(t, inverse);
      arrive_warp(smem.barrier(kOutFull, t));
    }
  }

  // No row of the tile sees a key: zeros, straight to global memory.
  __device__ __forceinline__ void store_empty(const FwdWork& w) {
    const FwdParams& p = args.params;
    const int q0 = w.q_block * Tile::kBlockQ;
    const int num_rows = min(Tile::kBlockQ, w.seqlen_q_slot - q0);
    const int chunks = p.head_dim_v / 8;
    auto* out = static_cast<uint16_t*>(p.out) + w.head * p.out_stride.head +
                (p.cu_seqlens_q ? 0 : w.batch * p.out_stride.batch);
    float* lse = p.lse + w.batch * p.lse_batch_stride + w.head * p.lse_head_stride;
    for (int i = thread(); i < num_rows * chunks; i += 128) {
      const int64_t row = w.q_row0 + q0 + i / chunks;
      *reinterpret_cast<uint4*>(out + row * p.out_stride.row + i % chunks * 8) = uint4{};
      if (i % chunks == 0) {
        lse[row] = p.sink && q0 + i / chunks < w.seqlen_q ? p.sink[w.head] : -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t tiles = 0;; ++tiles) {
      const FwdWork w = smem.take_work(tiles, true);
      if (w.q_block < 0) return;
      const BlockRange range = blocks_of<Tile>(args.params, w);
      if (range.end <= range.begin) {
        store_empty(w);
        continue;
      }
      run_blocks(range.end - range.begin);
      end_tile();
      ++used;
    }
  }
};

}  // namespace flash_cuda::sm100
