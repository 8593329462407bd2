// Backward attention for head dims up to 256 by pairs of thread blocks (cta_group::2), in two
// passes: dK and dV over the queries, dQ over the keys.
//
// A pair owns 128 rows of one side. One thread of the leader issues all products: S and dP of these
// rows with a block of the passing ones, of which each block of the pair has half, and the
// gradients of these rows, for which each block has half of the passing columns. Every gradient is
// written once, so there are no sums in global memory, and the order is always the same.
#pragma once

#include "ptx/elect.h"
#include "ptx/fence.h"
#include "ptx/tcgen05.h"
#include "ptx/tma.h"
#include "sm100/block.cuh"
#include "sm100/bwd_store.cuh"
#include "sm100/bwd_wide_scores.cuh"
#include "sm100/bwd_wide_smem.cuh"
#include "sm100/pair_rows.cuh"

namespace flash_cuda::sm100 {

// ---- load: one thread of each block

template <class Tile>
struct WideLoader {
  const BwdWideSmem<Tile>& smem;
  const BwdWideArgs& args;
  const int rank;

  // Boxes of the sequence's rows from `row` and `column` on: four of one row of boxes, or two each.
  template <bool kInRows>
  __device__ __forceinline__ void load(uint32_t to, uint32_t full, const CUtensorMap* map,
                                       const MapRows& at, int row, int column,
                                       uint64_t policy) const {
    // Bytes complete on the leader's barrier, which waits for those of both blocks.
    if (rank == 0) ptx::mbarrier_arrive_expect_tx(full, 2 * Tile::kTileBytes);
    full = ptx::mapa(full, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + (kInRows ? 0 : i % 2 * Tile::kBox);
      const int c = column + (kInRows ? i : i / 2) * Tile::kBox;
      load_rows_pair(to + i * Tile::kBoxBytes, map, full, c, r, at, policy);
    }
  }
  template <bool kKeys>
  __device__ __forceinline__ static MapRows locate(const WideTensor& tensor, const SeqInfo& s,
                                                   int head) {
    return kKeys ? tensor.rows.locate(s.kv_row0, s.seqlen_kv, head, s.kv_batch)
                 : tensor.rows.locate(s.q_row0, s.seqlen_q, head, s.q_batch);
  }
  // Operand `which` of a passing block: this block's half of the rows, or of the columns.
  template <bool kInRows>
  __device__ __forceinline__ void pass(int which, const MapRows& at, int row,
                                       uint32_t count) const {
    constexpr BwdWideBarrier kFull = kInRows ? kWideRowsFull : kWideColumnsFull;
    constexpr BwdWideBarrier kEmpty = kInRows ? kWideRowsEmpty : kWideColumnsEmpty;
    if (!kInRows || count == 1) ptx::mbarrier_wait(smem.barrier(kEmpty, which), count % 2 ^ 1);
    load<kInRows>(kInRows ? smem.rows(which) : smem.columns(which), smem.barrier(kFull, which),
                  &args.pass[which].map, at, row + (kInRows ? rank * Tile::kRows : 0),
                  kInRows ? 0 : rank * Tile::kHalfColumns, ptx::kEvictLast);
  }
  // Their memory is free when dK of two blocks before is done, which has been waited for.
  __device__ __forceinline__ void load_stats(int64_t first, uint32_t count) const {
    const uint32_t stage = count % Tile::kStagesStats, full = smem.barrier(kWideStatsFull, stage);
    constexpr int kBytes = Tile::kBlock * 4;
    ptx::mbarrier_arrive_expect_tx(full, 2 * kBytes);
    ptx::bulk_load(smem.lse(stage), args.workspace.lse_log2 + first, kBytes, full);
    ptx::bulk_load(smem.delta(stage), args.workspace.row_dot + first, kBytes, full);
  }

  // In the order in which the products need them.
  __device__ __forceinline__ void run() const {
    const BwdWideTask& t = smem.task();
    const SeqInfo& s = t.seq;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load<true>(smem.stay(i), smem.barrier(kWideStayFull, i), &args.stay[i].map,
                 locate<Tile::kKeysStay>(args.stay[i], s, t.head), t.row0 + rank * Tile::kRows, 0,
                 ptx::kEvictFirst);
    }
    uint32_t count = 0;
#pragma unroll 1
    for (BwdWideSteps at(t); at.left > 0; at.next(), ++count) {
      const MapRows one = locate<!Tile::kKeysStay>(args.pass[0], s, at.head);
      const MapRows two = locate<!Tile::kKeysStay>(args.pass[1], s, at.head);
      const int row = at.block * Tile::kBlock;
      pass<true>(0, one, row, count);
      if constexpr (Tile::kKeysStay) {
        load_stats((at.head * args.workspace.tiles + t.tile_base + at.block) * Tile::kBlock, count);
      }
      pass<true>(1, two, row, count);
      if constexpr (Tile::kKeysStay) pass<false>(1, two, row, count);
      pass<false>(0, one, row, count);
    }
  }
};

// ---- MMA: one thread of the leader

template <class Tile, DType kDType>
struct WideIssuer {
  static constexpr bool kBf16 = kDType == DType::kBFloat16;
  // Rows as they lie (K-major), and rows as the depth of the product (MN-major).
  static constexpr uint64_t kDescRows =
      ptx::tcgen05_desc_base(16, 8 * 128, ptx::kTcgen05Swizzle128);
  static constexpr uint64_t kDescDeep =
      ptx::tcgen05_desc_base(2 * Tile::kBoxBytes, 8 * 128, ptx::kTcgen05Swizzle128);
  static constexpr uint32_t kScores = ptx::tcgen05_f16_instruction(kBf16, false, false, 128, 128);
  static constexpr uint32_t kGradient = ptx::tcgen05_f16_instruction(kBf16, false, true, 128, 256);

  const BwdWideSmem<Tile>& smem;

  __device__ __forceinline__ void wait(BwdWideBarrier which, uint32_t count, int i = 0) const {
    ptx::mbarrier_wait(smem.barrier(which, i), count % 2);
  }
  // What warps of both blocks have read from tensor memory and stored.
  __device__ __forceinline__ void wait_warps(BwdWideBarrier which, uint32_t count) const {
    wait(which, count);
    ptx::tcgen05_fence_after_thread_sync();
  }

  // S or dP: rows that stay with rows that pass.
  __device__ __forceinline__ void scores(int which, uint32_t d, BwdWideBarrier full,
                                         uint32_t count) const {
    wait(kWideRowsFull, count, which);
#pragma unroll 1
    for (int box = 0; box < Tile::kHeadDim / Tile::kBox; ++box) {
      const uint64_t a = ptx::tcgen05_desc(smem.stay(which) + box * Tile::kBoxBytes, kDescRows);
      const uint64_t b = ptx::tcgen05_desc(smem.rows(which) + box * Tile::kBoxBytes, kDescRows);
#pragma unroll
      for (int k = 0; k < Tile::kBox / 16; ++k) {
        ptx::tcgen05_mma_ss<2>(d, a + 2 * k, b + 2 * k, kScores, box + k > 0);
      }
    }
    ptx::tcgen05_commit<2>(smem.barrier(full));
    // Later on the columns that the load warp has waited for, used after this product, say it.
    if (count == 0) ptx::tcgen05_commit<2>(smem.barrier(kWideRowsEmpty, which));
  }
  // d += a b over the passing rows; a: dS or P.
  __device__ __forceinline__ void gradient(int which, uint32_t a_tile, uint32_t count) const {
    wait(kWideColumnsFull, count, which);
    const uint32_t d = Tile::kTmemGrad + which * 128;
    const uint64_t b = ptx::tcgen05_desc(smem.columns(which), kDescDeep);
#pragma unroll
    for (int k = 0; k < Tile::kBlock / 16; ++k) {
      const uint64_t a = ptx::tcgen05_desc(a_tile + k / 4 * Tile::kBoxBytes, kDescRows);
      ptx::tcgen05_mma_ss<2>(d, a + k % 4 * 2, b + k * (16 * 128 / 16), kGradient,
                             count > 0 || k > 0);
    }
    ptx::tcgen05_commit<2>(smem.barrier(kWideColumnsEmpty, which));
  }

  // S and dP are a block ahead of the gradients.
  __device__ __forceinline__ void run() const {
    const uint32_t num_steps = smem.task().num_steps();
    wait(kWideStayFull, 0, 0);
    scores(0, Tile::kTmemS, kWideSFull, 0);
    wait(kWideStayFull, 0, 1);
    scores(1, Tile::kTmemDp, kWideDpFull, 0);
#pragma unroll 1
    for (uint32_t i = 0; i < num_steps; ++i) {
      const bool last = i + 1 == num_steps;
      wait_warps(kWidePReady, i);
      if (!last) scores(0, Tile::kTmemS, kWideSFull, i + 1);
      if constexpr (Tile::kKeysStay) gradient(1, smem.p(), i);
      wait_warps(kWideDsReady, i);
      if (!last) scores(1, Tile::kTmemDp, kWideDpFull, i + 1);
      gradient(0, smem.ds(), i);
    }
    ptx::tcgen05_commit<2>(smem.barrier(kWideDone));
  }
};

// ---- the block

// Nothing is seen by, or sees, the rows that stay: zero gradients, straight to global memory.
template <class Tile>
__device__ __forceinline__ void store_wide_zeros(const BwdWideArgs& args, const BwdWideTask& t,
                                                 int rank) {
  const BwdParams& p = args.params;
  const SeqInfo& s = t.seq;
  const int first = t.row0 + rank * Tile::kRows;
  const int slot = Tile::kKeysStay ? s.seqlen_kv_slot : s.seqlen_q_slot;
  const int rows = min(Tile::kRows, slot - first);
  const int64_t row0 = (Tile::kKeysStay ? s.kv_row0 : s.q_row0) + first;
  const int batch = Tile::kKeysStay ? s.kv_batch : s.q_batch;
  if constexpr (Tile::kKeysStay) {
    zero_rows(p.dk, p.dk_stride, batch, t.head, row0, rows, p.fwd.head_dim);
    zero_rows(p.dv, p.dv_stride, batch, t.head, row0, rows, p.fwd.head_dim_v);
  } else {
    zero_rows(p.dq, p.dq_stride, batch, t.head, row0, rows, p.fwd.head_dim);
  }
}

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    bwd_wide_kernel(const __grid_constant__ BwdWideArgs args) {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  const BwdWideSmem<Tile> smem{ptx::smem_addr(smem_raw),
                               reinterpret_cast<BwdWideExchange*>(smem_raw + Tile::kSmemExchange)};
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int rank = ptx::cluster_block_rank();
  constexpr int kMmaWarp = Tile::kScoresWarps, kLoadWarp = kMmaWarp + 1;
  if (warp == 0) {
    const BwdWideTask task = find_wide_task<Tile>(args);
    if (threadIdx.x == 0) smem.exchange->task = task;
  }
  begin_block<2>(smem, warp, kMmaWarp, Tile::kTmemColumns);
  const bool works = smem.task().valid && smem.task().num_steps() > 0;  // the same in both blocks
  if (!works) {
    if (smem.task().valid) store_wide_zeros<Tile>(args, smem.task(), rank);
  } else if (warp < Tile::kScoresWarps) {
    WideScores<Tile, kDType>{smem, args, warp, rank}.run();
  } else {
    const bool elected = ptx::elect_one();
    if (warp == kMmaWarp && rank == 0 && elected) WideIssuer<Tile, kDType>{smem}.run();
    if (warp == kLoadWarp && elected) WideLoader<Tile>{smem, args, rank}.run();
  }
  // Nobody reads or writes the other's memory any more.
  end_block<2>(smem, warp, kMmaWarp, Tile::kTmemColumns);
}

}  // namespace flash_cuda::sm100
