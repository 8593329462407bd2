// The sums of dQ of a section whose tasks are done become dQ between tasks of later sections, as
// long as they are in the L2 cache: instead of the post-pass. They pass through the stages of Q and
// dO, half of a row block each.
#pragma once

#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/tma.h"
#include "sm90/bwd_passes.cuh"
#include "sm90/bwd_smem.cuh"

namespace flash_cuda::sm90 {

// Where dQ is not whole 64 columns a warpgroup, or registers are short, the post-pass does it.
template <class Tile, bool kGeneral>
constexpr bool kConverts = !kGeneral && !Tile::kDqInTurns && Tile::kBiasStages == 0;

// Loader, one thread.
template <class Tile>
__device__ __forceinline__ void bwd_load_sums(const BwdArgs& args, const BwdTask<Tile>& task,
                                              uint32_t smem, RingPlace& ring) {
  using Smem = BwdSmem<Tile>;
  static_assert(2 * Smem::kQBytes == Smem::kDqBytes);
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const int first = args.first_item_of_section(task.section);
  const int draw_at = min_of(task.num_steps(), args.draw_at);
  wait_added(args, task.section);
#pragma unroll 1
  for (BwdSteps at(task); at.left > 0; at.next()) {
    const int stage = ring.slot;
    const char* const sums = reinterpret_cast<const char*>(args.work.dq) +
                             args.row_block_number(first + at.q_block) * Smem::kDqBytes;
    if (at.left == draw_at) ptx::mbarrier_arrive(bars.near_end());
    ptx::mbarrier_wait(bars.q_empty(stage), ring.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(bars.q_full(stage), Smem::kQBytes);
    ptx::bulk_load(smem + Smem::kQ + stage * Smem::kQBytes, sums, Smem::kQBytes,
                   bars.q_full(stage));
    ptx::mbarrier_wait(bars.dout_empty(stage), ring.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(bars.dout_full(stage), Smem::kQBytes);
    ptx::bulk_load(smem + Smem::kDout + stage * Smem::kQBytes, sums + Smem::kQBytes, Smem::kQBytes,
                   bars.dout_full(stage));
    ring.next();
  }
}

// Consumers, `thread` of a warpgroup: its half, which lies as its accumulators did, to registers
// and from there to memory. What has been read need not be written from the L2 cache to memory.
template <class Tile, DType kDType>
__device__ __forceinline__ void bwd_convert(const BwdArgs& args, const BwdTask<Tile>& task,
                                            uint32_t smem, const uint8_t* smem_ptr, int warpgroup,
                                            int thread, RingPlace& ring) {
  using Smem = BwdSmem<Tile>;
  static_assert(BwdBarriers<Tile>::kWarpsLeave);
  constexpr bool kSplitRows = Tile::kSplitDqRows;
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const FwdParams& p = args.params.fwd;
  const Stride& stride = args.params.dq_stride;
  const int first = args.first_item_of_section(task.section), lane = thread % 32, c = lane % 4;
  const int row = thread / 32 * 16 + lane / 4 + (kSplitRows ? warpgroup * 64 : 0);
  const int column = c * 8 + (kSplitRows ? 0 : warpgroup * 64);
#pragma unroll 1
  for (BwdSteps at(task); at.left > 0; at.next()) {
    const int stage = ring.slot;
    ptx::mbarrier_wait(warpgroup == 0 ? bars.q_full(stage) : bars.dout_full(stage), ring.phase);
    const float4* const sums = reinterpret_cast<const float4*>(
        smem_ptr + (warpgroup == 0 ? Smem::kQ : Smem::kDout) + stage * Smem::kQBytes);
    float4 v[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i / 4][i % 4] = sums[i * 128 + thread];
    ptx::named_barrier_sync(kDsReady, 256);  // BwdBarriers::kWarpsLeave
    if (lane == 0) {
      ptx::mbarrier_arrive(bars.q_empty(stage));
      ptx::mbarrier_arrive(bars.dout_empty(stage));
    }

    const int item = first + at.q_block, bh = item / args.q_blocks, b = bh / p.num_heads_q;
    ptx::discard_l2(reinterpret_cast<char*>(args.work.dq) +
                    args.row_block_number(item) * Smem::kDqBytes + warpgroup * Smem::kQBytes +
                    thread * 128);
    const int at_row = (item - bh * args.q_blocks) * Tile::kBlockQ + row;
    char* const out = static_cast<char*>(args.params.dq) +
                      2 * (b * stride.batch + (bh - b * p.num_heads_q) * stride.head +
                           at_row * stride.row + column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 rows[2];  // g and g + 8
      convert_quad<kDType>(rows, v[i], p.softmax_scale, c);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (column + i * 32 < p.head_dim && at_row + 8 * r < p.seqlen_q) {
          *reinterpret_cast<uint4*>(out + i * 64 + 16 * r * stride.row) = rows[r];
        }
      }
    }
    ring.next();
  }
}

}  // namespace flash_cuda::sm90
