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

// A row block in the order of the sections. Where sums are converted, that is the order of batches
// and heads. Divisions are made for the first of a conversion alone.
struct ConvertItem {
  int b, head, block;
  __device__ ConvertItem(const BwdArgs& args, int item) {
    const int heads = args.params.fwd.num_heads_q, line = item / args.q_blocks;
    b = line / heads;
    head = line - b * heads;
    block = item - line * args.q_blocks;
  }
  __device__ void next(const BwdArgs& args) {
    if (++block < args.q_blocks) return;
    block = 0;
    if (++head < args.params.fwd.num_heads_q) return;
    head = 0;
    ++b;
  }
  __device__ int64_t row_block(const BwdArgs& args) const {
    return head * args.work.row_blocks + b * args.q_blocks + block;
  }
};

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
  ConvertItem item(args, first + task.blocks.begin);
#pragma unroll 1
  for (int left = task.num_steps(); left > 0; --left, item.next(args)) {
    const int stage = ring.slot;
    const char* const sums =
        reinterpret_cast<const char*>(args.work.dq) + item.row_block(args) * Smem::kDqBytes;
    if (left == draw_at) ptx::mbarrier_arrive(bars.near_end());
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
// and from there to memory.
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
  ConvertItem item(args, first + task.blocks.begin);
#pragma unroll 1
  for (int left = task.num_steps(); left > 0; --left, item.next(args)) {
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

    const int at_row = item.block * Tile::kBlockQ + row;
    char* const out =
        static_cast<char*>(args.params.dq) +
        2 * (item.b * stride.batch + item.head * stride.head + at_row * stride.row + column);
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
