// Forward attention with TMA and wgmma (Hopper).
//
// A block computes Tile::kBlockQ rows of O at a time, 64 in each of its consumer warpgroups, and
// stays on its SM for many such tiles. Warpgroup 0 is the producer: one warp draws tiles, one
// issues the copies of Q, K and V. K and V go through rings of their own that run on across tiles,
// so the next tile loads while the last one ends. KV blocks are visited from last to first: the
// masked end comes first. S of the next block is computed while the softmax of this one waits for
// it, and O += P V of the previous block runs under the softmax.
//
// The softmax does not look for row maxima in blocks that need no mask. It subtracts the reference
// that the row has, and checks the sums of the exponentials once a block; where they grew too large
// the warp repairs the block (see consume_block). docs/kernels/sm90_fwd.md has the timeline.
#pragma once

#include <type_traits>

#include "ptx/convert.h"
#include "ptx/fence.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/smem_addr.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/fwd_args.h"
#include "sm90/fwd_general.cuh"
#include "sm90/fwd_load.cuh"
#include "sm90/fwd_softmax.cuh"
#include "sm90/fwd_tile.h"

namespace flash_cuda::sm90 {

// Numbered from 1; each has one barrier a consumer warpgroup.
enum NamedBarrier : int { kStagingFree = 1, kStagingFull = 5, kTurn = 9 };

// The same value in every lane, said so that the compiler knows.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

template <class Tile, DType kDType>
struct Consumer {
  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  static constexpr int kN = Tile::kBlockKV;
  static constexpr int kStepsQK = Tile::kHeadDim / 16, kStepsPV = kN / 16;
  static constexpr int kPanelBytes = Tile::kPanelBytes, kStepsPanel = kPanelBytes / 32;
  static constexpr uint32_t kSwizzle =
      kPanelBytes == 128 ? ptx::kDescSwizzle128 : ptx::kDescSwizzle64;
  static constexpr uint64_t kDescQK = ptx::wgmma_desc_base(16, 8 * kPanelBytes, kSwizzle);
  static constexpr uint64_t kDescV =
      ptx::wgmma_desc_base(kN * kPanelBytes, 8 * kPanelBytes, kSwizzle);
  // Sums above kRepairAbove are repaired: P must not overflow its type. From kRecomputeFrom on (or
  // with a NaN) the exponentials themselves may have overflowed, so S is computed again.
  static constexpr float kRepairAbove = kBf16 ? 0x1p60f : 0x1p14f;
  static constexpr float kRecomputeFrom = 0x1p120f;
  // General variant: how far a logit may rise above its row's reference.
  static constexpr float kRise = (kBf16 ? 60 : 14) * kLn2;

  const FwdSmem<Tile> smem;
  const FwdArgs& args;
  const int warpgroup, thread;  // thread: within the warpgroup

  float s[kN / 2];  // scores, then probabilities
  float o[Tile::kHeadDimV / 2];
  uint32_t p[kStepsPV][4];  // probabilities as wgmma A fragments
  SoftmaxRows rows;
  // Counted from the start of the kernel; stages and phases follow. O += P V
  // takes the V block before the K block in turn. Tile::kLooksAhead: of turns, see fwd_ahead.cuh.
  uint32_t tiles = 0, blocks = 0;
  int next_turn = 0;  // kRagged: barrier of the warpgroup that has its turn next, in this tile
  bool is_next_full = false;  // Tile::kLooksAhead: the next K and V block were seen to be there
  // This warp had to compute scores again and takes the exact softmax in the rest of the tile:
  // inputs that leap once do so again, and a leap costs three exact blocks. Not in later tiles,
  // since it is chance which those are, and equal inputs are to give equal bits.
  bool leaps = false;

  // Dense: what is the same for all tiles comes from the arguments.
  using Work = std::conditional_t<Tile::has(kDense), FwdWork, const FwdWork&>;
  __device__ __forceinline__ Work work() const {
    const FwdWork& w = smem.slot(tiles).work;
    if constexpr (Tile::has(kDense)) {
      const FwdParams& p = args.params;
      return {w.q_block, w.head, w.batch, 0, p.seqlen_q, p.seqlen_q, p.seqlen_kv, 0};
    } else {
      return w;
    }
  }

  // Byte offset of 16-byte chunk `chunk` of a row in a panel.
  static __device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    const uint32_t at = row * kPanelBytes + chunk * 16;
    return at ^ ((at >> 3) & (kPanelBytes == 128 ? 0x70 : 0x30));
  }
  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp_row() const { return thread / 32 * 16; }

  __device__ __forceinline__ void pin_p() {
#pragma unroll
    for (int k = 0; k < kStepsPV; ++k) ptx::pin(p[k]);
  }

  // Of a stage. Where every instruction between two GEMMs counts, it is the first stage's, which is
  // the same for all blocks, and a multiple.
  static __device__ __forceinline__ uint64_t stage_desc(uint32_t at, uint32_t first, uint32_t count,
                                                        int stage_bytes, uint64_t base) {
    if (!Tile::kLooksAhead) return ptx::wgmma_desc(at, base);
    return ptx::wgmma_desc(first, base) + uint64_t(count % Tile::kStages * (stage_bytes / 16));
  }

  // Issues S = Q K^T for the K block in turn.
  __device__ __forceinline__ void issue_qk() {
    using Mma = ptx::Wgmma<kN>;
    const uint64_t desc_k =
        stage_desc(smem.k(blocks), smem.k(0), blocks, Tile::kStageBytesK, kDescQK);
    const uint64_t desc_q = ptx::wgmma_desc(smem.q(warpgroup), kDescQK);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStepsQK; ++k) {
      const int panel = k / kStepsPanel, step = k % kStepsPanel * 2;
      const uint64_t b = desc_k + uint64_t(panel * (kN * kPanelBytes / 16) + step);
      const uint64_t a = desc_q + uint64_t(panel * (64 * kPanelBytes / 16) + step);
      if (k == 0) {
        Mma::template ss_zero<kBf16, 0, 0>(s, a, b);
      } else {
        Mma::template ss<kBf16, 0, 0>(s, a, b);
      }
    }
    ptx::wgmma_commit_group();
  }

  // Issues O += P V for V block `block`.
  __device__ __forceinline__ void issue_pv(uint32_t block) {
    const uint64_t desc_v = stage_desc(smem.v(block), smem.v(0), block, Tile::kStageBytesV, kDescV);
    ptx::pin(o);
    pin_p();
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStepsPV; ++k) {
      ptx::Wgmma<Tile::kHeadDimV>::template rs<kBf16, 1>(
          o, p[k], desc_v + uint64_t(k * (16 * kPanelBytes / 16)));
    }
    ptx::wgmma_commit_group();
  }

  // After this O is complete and P may be overwritten.
  __device__ __forceinline__ void wait_pv() {
    ptx::wgmma_wait_group<0>();
    ptx::pin(o);
    pin_p();
  }

  // Probabilities become A fragments.
  __device__ __forceinline__ void convert_p() {
#pragma unroll
    for (int k = 0; k < kStepsPV; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[k][i] = ptx::pack<kDType>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
      }
    }
  }

  // At the block of a pair that copies into the stage.
  static __device__ __forceinline__ void arrive_at(uint32_t rank, uint32_t bar) {
    if constexpr (Tile::has(kPair)) {
      ptx::mbarrier_arrive_cluster(ptx::mapa(bar, rank));
    } else {
      ptx::mbarrier_arrive(bar);
    }
  }
  // This warp has read the K block in turn (every warp arrives), this warpgroup the V block.
  __device__ __forceinline__ void release_k() {
    __syncwarp();
    if (lane() == 0) arrive_at(Tile::kLoadsK, smem.k_ring().empty(blocks));
  }
  __device__ __forceinline__ void release_v(uint32_t block) {
    if (thread == 0) arrive_at(Tile::kLoadsV, smem.v_ring().empty(block));
  }
  __device__ __forceinline__ void wait_k() { smem.k_ring().wait_full(blocks); }
  __device__ __forceinline__ void wait_v(uint32_t block) { smem.v_ring().wait_full(block); }
  // Tile::kLooksAhead: K and V of a turn; looks whether the next one's are there.
  __device__ __forceinline__ void release_turn(uint32_t turn);
  __device__ __forceinline__ void look_ahead();
  // Passes over K and V blocks that only other warpgroups need. Who takes part in a tile has a turn
  // at each of its blocks.
  template <bool kTakesPart = true>
  __device__ __forceinline__ void skip_k(int count) {
    for (int i = 0; i < count; ++i) {
      wait_k();
      if constexpr (Tile::kLooksAhead) {
        if constexpr (kTakesPart) {
          take_turn();
          pass_turn();
        }
        release_turn(blocks);
      } else {
        release_k();
      }
      if (has_bias_slice()) smem.bias_ring().wait_full(blocks);
      release_bias();
      ++blocks;
    }
  }
  // V is released for the whole warpgroup, so only the warp that does it may
  // look at the barrier, and all its lanes before it does: who comes late
  // could miss the phase.
  __device__ __forceinline__ void skip_v(uint32_t begin, uint32_t end) {
    if (!Tile::kLooksAhead && begin != end && uniform(thread / 32) == 0) {
      for (; begin != end; ++begin) {
        wait_v(begin);
        __syncwarp();
        release_v(begin);
      }
    }
  }

  __device__ __forceinline__ void take_turn() {
    if constexpr (Tile::has(kPingPong)) ptx::named_barrier_sync(kTurn + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (Tile::has(kPingPong)) {
      const int next = warpgroup == Tile::kWarpgroups - 1 ? 0 : warpgroup + 1;
      ptx::named_barrier_arrive(Tile::has(kRagged) ? next_turn : kTurn + next, 256);
    }
  }

  __device__ __forceinline__ void release_q() {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(smem.q_ring(warpgroup).empty(tiles));
  }

  // Scores of this warp's rows once more, by mma.sync from shared memory. Rare.
  __device__ __forceinline__ void recompute_scores() {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) s[i] = 0.f;
#pragma unroll 1
    for (int k = 0; k < kStepsQK; ++k) {
      __syncwarp();
      uint32_t a[4];
      ptx::ldmatrix_x4(
          a, smem.q(warpgroup) + k / kStepsPanel * (64 * kPanelBytes) +
                 swizzled(warp_row() + (lane() & 15), k % kStepsPanel * 2 + (lane() >> 4)));
      const int row =
          (lane() & 7) + (lane() >> 4) * 8;  // of two 8-key matrices, two halves of k each
      const uint32_t at = smem.k(blocks) + k / kStepsPanel * (kN * kPanelBytes) +
                          swizzled(row, k % kStepsPanel * 2 + ((lane() >> 3) & 1));
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, at + j * 16 * kPanelBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* d = &s[8 * j + 4 * half];
          float tile[4] = {d[0], d[1], d[2], d[3]};
          ptx::mma_m16n8k16<kDType>(tile, a, b[2 * half], b[2 * half + 1]);
#pragma unroll
          for (int i = 0; i < 4; ++i) d[i] = tile[i];
        }
      }
    }
  }
  // Masks and exact softmax of the complete scores of `kv_block`. What the mask needs is read from
  // shared memory again, to keep registers free for the blocks that need no mask.
  __device__ __forceinline__ void exact_softmax(int kv_block, bool masked, float (&rescale)[2]) {
    const auto first_row = [this] { return lane_row(); };
    const auto first_key = [this, kv_block] { return lane_key(kv_block); };
    if (masked) {
      mask_scores<Tile::kMayChunk>(s, Mask::make(args.params, work().seqlen_q, work().seqlen_kv),
                                   first_row(), first_key());
    }
    softmax_exact(s, args.scale_log2, rows, rescale);
  }
  __device__ __forceinline__ int lane_key(int kv_block) const {
    return kv_block * kN + 2 * (lane() & 3);
  }
  // General variant: products become logits.
  template <bool kFirst>
  __device__ __forceinline__ void make_logits(int kv_block, bool masked) {
    const auto mod =
        ScoreMod::make(args.params, work().batch, work().head, work().seqlen_q, work().seqlen_kv);
    if (has_bias_slice()) smem.bias_ring().wait_full(blocks);
    modify_scores<kDType, Tile::has(kNarrowBias), kFirst>(s, mod, lane_row(), lane_key(kv_block),
                                                          bias_slice());
    release_bias();
    if (masked) {
      mask_scores(s, Mask::make(args.params, work().seqlen_q, work().seqlen_kv), lane_row(),
                  lane_key(kv_block));
    }
  }
  __device__ __forceinline__ bool has_bias_slice() const {
    return Tile::has(kGeneral) && args.bias_rows != 0;
  }
  __device__ __forceinline__ BiasSlice bias_slice() const {
    if (args.bias_rows == 1) return {smem.bias(blocks, 0), 0, lane(), true};
    return {args.bias_rows ? smem.bias(blocks, warpgroup) : 0, warp_row(), lane(), false};
  }
  // In step with K: a warp has read its part of the block's bias.
  __device__ __forceinline__ void release_bias() {
    if (!has_bias_slice()) return;
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(smem.bias_ring().empty(blocks));
  }

  __device__ __forceinline__ FwdWalk walk() const {
    const auto& slot = smem.slot(tiles);
    FwdWalk w = slot.walks[slot.kWalks == 1 ? 0 : warpgroup];
    w.begin = uniform(w.begin);
    w.end = uniform(w.end);
    w.full_begin = uniform(w.full_begin);
    w.full_end = uniform(w.full_end);
    w.exact_begin = uniform(w.exact_begin);
    w.skip_right = !Tile::kMaySkip ? 0 : uniform(w.skip_right);
    w.skip_left = !Tile::kMaySkip ? 0 : uniform(w.skip_left);
    return w;
  }
  // First row of this warpgroup, and of this lane.
  __device__ __forceinline__ int own_row() const {
    return tile_row<Tile>(args, work().q_block) + 64 * warpgroup;
  }
  __device__ __forceinline__ int lane_row() const { return own_row() + warp_row() + lane() / 4; }

  // The first KV block of a tile: S, softmax. One after the first: S, O += P V of the block before,
  // softmax.
  __device__ __forceinline__ void first_block(const FwdWalk& walk);
  template <bool kExact>
  __device__ __forceinline__ void consume_block(int kv_block, bool masked);
  // The same where Tile::kLooksAhead.
  template <bool kExact>
  __device__ __forceinline__ void consume_ahead(int kv_block, bool masked);
  __device__ __forceinline__ void repair(float sum0, float sum1, bool has_scores,
                                         float (&rescale)[2]);
  __device__ __forceinline__ void other_blocks(const FwdWalk& walk);
  // The last O += P V; sums become factors for O, and lse; both are written.
  __device__ __forceinline__ void end_rows(RowEnd (&ends)[2]);
  __device__ __forceinline__ void finish_tile(const FwdWalk& walk);
  __device__ __forceinline__ void store_tile(const RowEnd (&ends)[2]);
  // kShareTail; see fwd_tail.cuh.
  __device__ __forceinline__ float4* part_memory(const FwdPart& part, int number) const;
  __device__ __forceinline__ bool leave_part(const FwdPart& part);
  __device__ __forceinline__ void join_parts(const FwdPart& part);
  __device__ __forceinline__ void store_empty();
  __device__ __forceinline__ void pass_over(const FwdWalk& walk);
  __device__ __forceinline__ void run();
};

template <class Tile, DType kDType>
template <bool kExact>
__device__ __forceinline__ void Consumer<Tile, kDType>::consume_block(int kv_block, bool masked) {
  wait_k();
  take_turn();
  issue_qk();
  wait_v(blocks - 1);
  issue_pv(blocks - 1);
  pass_turn();
  ptx::wgmma_wait_group<1>();
  ptx::pin(s);

  if constexpr (Tile::has(kGeneral)) {
    release_k();
    float rescale[2];
    make_logits<false>(kv_block, masked);
    const bool risen = softmax_lazy(s, args.params.strict ? 0.f : kRise, rows, rescale);
    wait_pv();
    release_v(blocks - 1);
    convert_p();
    if (risen) scale_rows(o, rescale[0], rescale[1]);
  } else if constexpr (kExact) {
    release_k();
    float rescale[2];
    exact_softmax(kv_block, masked, rescale);
    wait_pv();
    release_v(blocks - 1);
    convert_p();
    scale_rows(o, rescale[0], rescale[1]);
  } else {
    float sum0 = 0.f, sum1 = 0.f, rescale[2];
    ptx::leave_unset(rescale[0]);
    ptx::leave_unset(rescale[1]);
    const bool raised = leaps && raise_references(s, args.scale_log2, rows, rescale);
    exponentials(s, args.scale_log2, rows.reference[0], rows.reference[1], sum0, sum1);
    const bool grown =
        __any_sync(~0u, raised || !(sum0 <= kRepairAbove) || !(sum1 <= kRepairAbove));
    if (!grown) {
      rows.sum[0] += sum0;
      rows.sum[1] += sum1;
      release_k();
    }
    // All warps wait here, whatever they found. Converting P in both branches
    // keeps its registers free for the repair.
    wait_pv();
    if (grown) {
      if (raised) {
        rows.sum[0] += sum0;
        rows.sum[1] += sum1;
      } else {
        repair(sum0, sum1, false, rescale);
      }
      __syncwarp();
      release_k();
      convert_p();
      scale_rows(o, rescale[0], rescale[1]);
    } else {
      convert_p();
    }
    release_v(blocks - 1);
  }
  ++blocks;
}

// The sums of a block grew beyond the range of P. Raises the references of this warp's rows and
// brings s, the sums and the factors for o in line. has_scores: s holds scores still.
template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::repair(float sum0, float sum1,
                                                               bool has_scores,
                                                               float (&rescale)[2]) {
  __syncwarp();
  if (!__any_sync(~0u, has_scores || !(sum0 < kRecomputeFrom) || !(sum1 < kRecomputeFrom))) {
    // Exact powers of two: the exponent of the largest sum of each row.
    const int up0 = max((__float_as_int(quad_max(sum0)) >> 23) - 127, 0);
    const int up1 = max((__float_as_int(quad_max(sum1)) >> 23) - 127, 0);
    rescale[0] = __int_as_float((127 - up0) << 23);
    rescale[1] = __int_as_float((127 - up1) << 23);
    rows.reference[0] += float(up0);
    rows.reference[1] += float(up1);
    rows.sum[0] = (rows.sum[0] + sum0) * rescale[0];
    rows.sum[1] = (rows.sum[1] + sum1) * rescale[1];
    scale_rows(s, rescale[0], rescale[1]);
  } else {
    leaps = true;
    if (!has_scores) recompute_scores();
    softmax_exact(s, args.scale_log2, rows, rescale);
  }
}

// S and the exact softmax of a tile's first block; there is no P V to overlap with.
template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::first_block(const FwdWalk& walk) {
  const uint32_t skipped = blocks;
  skip_k(walk.skip_right);
  smem.q_ring(warpgroup).wait_full(tiles);
  wait_k();
  take_turn();
  issue_qk();
  pass_turn();
  ptx::wgmma_wait_group<0>();
  ptx::pin(s);
  if constexpr (!Tile::kLooksAhead) {
    release_k();
  } else if constexpr (!Tile::kReleasesLate) {
    release_turn(blocks);
  }
  rows.reset();
  float unused[2];
  if constexpr (Tile::has(kGeneral)) {
    make_logits<true>(walk.end - 1, walk.is_masked(walk.end - 1));
    softmax_exact<true>(s, 1.0f, rows, unused);
  } else {
    exact_softmax(walk.end - 1, walk.is_masked(walk.end - 1), unused);
  }
  convert_p();
  skip_v(skipped, blocks);
  ++blocks;
  is_next_full = false;
  leaps = false;
}

template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::other_blocks(const FwdWalk& walk) {
#pragma unroll
  for (int i = 0; i < Tile::kHeadDimV / 2; ++i) o[i] = 0.f;
  int kv_block = walk.end - 2;
  // Masked blocks on the right, full blocks, masked blocks on the left.
  for (int exact_end = walk.exact_begin;; exact_end = walk.begin) {
#pragma unroll 1
    for (; kv_block >= exact_end; --kv_block) {
      if constexpr (Tile::kLooksAhead) {
        consume_ahead<true>(kv_block, walk.is_masked(kv_block));
      } else {
        consume_block<true>(kv_block, walk.is_masked(kv_block));
      }
    }
    if (kv_block < walk.begin) break;
    if constexpr (!Tile::has(kGeneral)) {
#pragma unroll 1
      for (; kv_block >= walk.full_begin; --kv_block) {
        if constexpr (Tile::kLooksAhead) {
          consume_ahead<false>(kv_block, false);
        } else {
          consume_block<false>(kv_block, false);
        }
      }
    }
  }
  release_q();
}

template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::finish_tile(const FwdWalk& walk) {
  const uint32_t last = blocks - 1;
  RowEnd ends[2];
  const uint32_t v_turn = Tile::kLooksAhead ? last + 1 : last;
  wait_v(v_turn);
  issue_pv(v_turn);
  const bool is_part = Tile::has(kShareTail) && uniform(smem.slot(tiles).part.count) > 1;
  if (!is_part) end_rows(ends);
  wait_pv();
  if constexpr (Tile::kLooksAhead) {
    if (Tile::kReleasesLate) release_turn(last);
    release_turn(v_turn);
    ++blocks;
  } else {
    release_v(v_turn);
  }
  skip_k(walk.skip_left);
  skip_v(last + 1, blocks);
  if (is_part) {
    if (!leave_part(smem.slot(tiles).part)) return;
    join_parts(smem.slot(tiles).part);
    end_rows(ends);
  }
  store_tile(ends);
}

}  // namespace flash_cuda::sm90
