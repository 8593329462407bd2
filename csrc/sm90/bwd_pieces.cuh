// The pieces of a shared task (BwdShares) become its gradients of K and V.
#pragma once

#include "ptx/named_barrier.h"
#include "ptx/red.h"
#include "ptx/wgmma.h"
#include "sm90/bwd_work.cuh"

namespace flash_cuda::sm90 {

// A thread's accumulators of a piece in the workspace, in float32: kThreads threads abreast, one
// array behind the other.
template <int kThreads, int kCount, int... kCounts>
__device__ __forceinline__ void leave_piece(float4* at, const float (&acc)[kCount],
                                            const float (&... others)[kCounts]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    at[i * kThreads] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
  }
  if constexpr (sizeof...(others) > 0) {
    leave_piece<kThreads>(at + kCount / 4 * kThreads, others...);
  }
}
template <int kThreads, int kCount, int... kCounts>
__device__ __forceinline__ void add_piece(const float4* at, float (&acc)[kCount],
                                          float (&... others)[kCounts]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float4 v = __ldcg(at + i * kThreads);
    acc[4 * i] += v.x;
    acc[4 * i + 1] += v.y;
    acc[4 * i + 2] += v.z;
    acc[4 * i + 3] += v.w;
  }
  if constexpr (sizeof...(others) > 0) {
    add_piece<kThreads>(at + kCount / 4 * kThreads, others...);
  }
}
template <int... kCounts>
__device__ __forceinline__ void clear_sums(float (&... acc)[kCounts]) {
  const auto clear = [](auto& sums) {
#pragma unroll
    for (auto& sum : sums) sum = 0.0f;
  };
  (clear(acc), ...);
}

// The threads of a group, kThreads that meet at a named barrier, leave their accumulators of a
// piece in the workspace; `mine` is this thread's place in the first piece there is, one of the
// threads `counts` the pieces that are `done`. If this is the last one, the accumulators become the
// sums of all pieces, in their order, whoever that is.
template <int kThreads, class Tile, int... kCounts>
__device__ __forceinline__ void join_pieces(const BwdArgs& args, const BwdTask<Tile>& task,
                                            float4* mine, int* done, bool counts, bool& last,
                                            int barrier, float (&... acc)[kCounts]) {
  constexpr int kVectors = BwdWorkspace::piece_floats(Tile::kHeadDim) / 4;
  const auto at = [&](int slot) { return mine + int64_t(slot) * kVectors; };
  leave_piece<kThreads>(at(task.slot), acc...);
  ptx::named_barrier_sync(barrier, kThreads);
  if (counts) last = ptx::add_acq_rel(done, 1) == task.pieces - 1;
  ptx::named_barrier_sync(barrier, kThreads);
  if (!last) return;
  const int first = BwdShares::slot(args.shares.first_share(task.shared), task.shared);
  clear_sums(acc...);
#pragma unroll 1
  for (int piece = 0; piece < task.pieces; ++piece) add_piece<kThreads>(at(first + piece), acc...);
}

}  // namespace flash_cuda::sm90
