// The main loop where K and V have many stages: short blocks, three and four warpgroups.
//
// A block of 64 keys is 180 instructions a warp at head dim 64, 110 of them the softmax. The others
// cost most where each waits for the one before and no S is under way. So whatever can be done
// between the GEMMs and the wait for S is done there: to look whether the next stages are full, to
// release the stages of the block before, if there are others enough. P is converted beside the
// exponentials or while the vote on the sums runs; the few blocks that are repaired do it again.
//
// V of a block has the turn of the K block after it, beside which it is multiplied: the two share
// a stage's barriers. A tile of n blocks is n + 1 turns: the first has only K, the last only V.
#pragma once

#include "sm90/fwd_kernel.cuh"

namespace flash_cuda::sm90 {

template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::release_turn(uint32_t turn) {
  __syncwarp();
  if (lane() == 0) arrive_at(turn % Tile::kCluster, smem.k_ring().empty(turn));
}

template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::look_ahead() {
  is_next_full = smem.k_ring().is_full(blocks + 1);
}

template <class Tile, DType kDType>
template <bool kExact>
__device__ __forceinline__ void Consumer<Tile, kDType>::consume_ahead(int kv_block, bool masked) {
  if (!is_next_full) wait_k();
  take_turn();
  issue_qk();
  issue_pv(blocks);
  pass_turn();
  // Under S. This turn's K may be read again by a repair, its V is read until wait_pv().
  if (Tile::kReleasesLate) release_turn(blocks - 1);
  look_ahead();
  // Conversions fill the gaps between exponentials where P V is short and done by then.
  constexpr bool kConvertsAmong = !kExact && Tile::kHeadDimV < 128;
  if constexpr (kConvertsAmong) {
    wait_pv();
  } else {
    ptx::wgmma_wait_group<1>();
  }
  ptx::pin(s);
  if constexpr (kExact) {
    float rescale[2];
    exact_softmax(kv_block, masked, rescale);
    wait_pv();
    convert_p();
    scale_rows(o, rescale[0], rescale[1]);
  } else {
    float sum0, sum1;
    ptx::leave_unset(sum0);
    ptx::leave_unset(sum1);
    if (!leaps) {
      exponentials<false, true>(s, args.scale_log2, rows.reference[0], rows.reference[1], sum0,
                                sum1);
      if constexpr (kConvertsAmong) {
        convert_p();
        pin_p();  // here, not where it is used
      }
    }
    const bool grown = __any_sync(~0u, leaps || !(sum0 <= kRepairAbove) || !(sum1 <= kRepairAbove));
    if constexpr (!kConvertsAmong) {
      wait_pv();
      convert_p();
      pin_p();
    }
    if (grown) {
      float rescale[2];
      repair(sum0, sum1, leaps, rescale);
      convert_p();
      scale_rows(o, rescale[0], rescale[1]);
    } else {
      rows.sum[0] += sum0;
      rows.sum[1] += sum1;
    }
  }
  if (!Tile::kReleasesLate) release_turn(blocks);
  ++blocks;
}

}  // namespace flash_cuda::sm90
