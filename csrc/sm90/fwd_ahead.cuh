// The main loop where K and V have many stages: short blocks, three and four warpgroups.
//
// A block of 64 keys is 180 instructions a warp at head dim 64, 110 of them the softmax. The others
// cost most where each waits for the one before and no S is under way. So whatever can be done
// between the GEMMs and the wait for S is done there: to look whether the next stages are full and
// whether exact softmax is asked for, to release the stages of the block before, if there are
// others enough. P is converted while the vote on the sums runs; the few blocks that are repaired
// do it again.
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
__device__ __forceinline__ bool Consumer<Tile, kDType>::consume_ahead(int kv_block, bool masked) {
  if (!is_next_full) wait_k();
  take_turn();
  issue_qk();
  issue_pv(blocks);
  pass_turn();
  // Under S. This turn's K may be read again by a repair, its V is read until wait_pv().
  if (Tile::kReleasesLate) release_turn(blocks - 1);
  look_ahead();
  bool next_exact = false;
  if constexpr (!kExact) next_exact = __any_sync(~0u, exact_from() <= blocks + 1);
  ptx::wgmma_wait_group<1>();
  ptx::pin(s);
  if constexpr (kExact) {
    float rescale[2];
    exact_softmax(kv_block, masked, rescale);
    wait_pv();
    convert_p();
    scale_rows(o, rescale[0], rescale[1]);
  } else {
    float sum0, sum1;
    exponentials<false, true>(s, args.scale_log2, rows.reference[0], rows.reference[1], sum0, sum1);
    const bool grown = __any_sync(~0u, !(sum0 <= kRepairAbove) || !(sum1 <= kRepairAbove));
    wait_pv();
    convert_p();
    pin_p();  // here, not where it is used
    if (grown) {
      float rescale[2];
      repair(sum0, sum1, rescale);
      convert_p();
      scale_rows(o, rescale[0], rescale[1]);
    } else {
      rows.sum[0] += sum0;
      rows.sum[1] += sum1;
    }
  }
  if (!Tile::kReleasesLate) release_turn(blocks);
  ++blocks;
  return next_exact;
}

}  // namespace flash_cuda::sm90
