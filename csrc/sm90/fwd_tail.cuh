// The last round of tiles in equal shares: who works on what, and how the parts of a tile are put
// together (fwd_tail.h says when).
//
// Who has a part of a tile leaves O without the rows' factors, references and sums in the
// workspace, every thread its own registers. The warpgroup that is the last to do so adds the parts
// up, from the first to the last, so that the bits do not depend on which it is.
#pragma once

#include "ptx/red.h"
#include "sm90/fwd_kernel.cuh"

namespace flash_cuda::sm90 {

// Parts that are there, for each warpgroup of the shared tiles. Zero between launches.
constexpr int kStreamArrivals = 256, kArrivals = 1024;
static __device__ int part_arrivals[kArrivals][kMostShared];

// Publishes what is between two units of a share, the first of them, up to the end of a tile.
// Returns the unit behind it. A tile's units are its blocks from the last to the first.
template <class Tile>
__device__ __forceinline__ int publish_part(const FwdSmem<Tile>& smem, const FwdArgs& args,
                                            uint32_t count, int share, int unit, int end) {
  const int blocks = args.tail.blocks, tile = unit / blocks, first = tile * blocks;
  const int stop = min(end, first + blocks), first_share = args.deal.owner(first);
  auto& slot = smem.slot(count);
  fill_slot<Tile>(slot, args, dense_work(args, args.tail.from + tile));
  FwdWalk& walk = slot.walks[0];
  walk.end = slot.kv_end = first + blocks - unit;
  walk.begin = slot.kv_begin = first + blocks - stop;
  walk.full_begin = max(walk.full_begin, walk.begin);
  walk.exact_begin = max(walk.exact_begin, walk.begin);
  slot.part = {tile, first_share, share - first_share,
               args.deal.owner(first + blocks - 1) - first_share + 1};
  ptx::mbarrier_arrive(smem.work_ring().full(count));
  return stop;
}

// schedule_dense with a shared tail.
template <class Tile>
__device__ __forceinline__ void schedule_shared(const FwdSmem<Tile>& smem, const FwdArgs& args) {
  const int items = args.tail.from + args.tail.shares;
  uint32_t tiles = 0;
  for (int index = blockIdx.x; index < items; ++tiles) {
    if (index < args.tail.from) {
      smem.slot(tiles).part.count = 1;
      publish(smem, args, tiles, dense_work(args, index));
    } else {
      const int share = index - args.tail.from, end = args.deal.begin(share + 1);
      int unit = args.deal.begin(share);
      while ((unit = publish_part(smem, args, tiles, share, unit, end)) < end) {
        wait_to_publish(smem, tiles);
        ++tiles;
      }
    }
    index = draw_in_time(smem, args, items, tiles);
  }
  publish_end(smem, tiles);
}

// Where this thread has its registers of a part, four at a time.
template <class Tile, DType kDType>
__device__ __forceinline__ float4* Consumer<Tile, kDType>::part_memory(const FwdPart& part,
                                                                       int number) const {
  const int place = 2 * (part.first_share + number) + (number == 0 ? 1 : 0);
  return static_cast<float4*>(args.params.workspace) + int64_t{place} * Tile::kPartVectors +
         128 * warpgroup + thread;
}

// Leaves this warpgroup's rows of a part. Returns whether those of all parts of the tile are there.
template <class Tile, DType kDType>
__device__ __forceinline__ bool Consumer<Tile, kDType>::leave_part(const FwdPart& part) {
  float4* own = part_memory(part, part.number);
  own[0] = {rows.reference[0], rows.reference[1], rows.sum[0], rows.sum[1]};
#pragma unroll
  for (int i = 0; i < Tile::kHeadDimV / 8; ++i) {
    own[(i + 1) * 128 * Tile::kWarpgroups] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
  }
  ptx::named_barrier_sync(kStagingFree + warpgroup, 128);
  if (thread == 0) {
    int* arrived = &part_arrivals[args.arrivals][part.tile * Tile::kWarpgroups + warpgroup];
    const bool last = ptx::add_acq_rel(arrived, 1) == part.count - 1;
    if (last) *arrived = 0;
    ptx::store_shared(smem.joins(warpgroup), last);
  }
  ptx::named_barrier_sync(kStagingFull + warpgroup, 128);
  return ptx::load_shared(smem.joins(warpgroup)) != 0;
}

// The whole tile's o, references and sums.
template <class Tile, DType kDType>
__device__ __forceinline__ void Consumer<Tile, kDType>::join_parts(const FwdPart& part) {
  float ref0 = -INFINITY, ref1 = -INFINITY;
#pragma unroll 1
  for (int number = 0; number < part.count; ++number) {
    const float4 ends = __ldcg(part_memory(part, number));
    ref0 = fmaxf(ref0, ends.x);
    ref1 = fmaxf(ref1, ends.y);
  }
  rows.reference[0] = ref0;
  rows.reference[1] = ref1;
  // A row of nothing but -inf.
  if (ref0 == -INFINITY) ref0 = 0.f;
  if (ref1 == -INFINITY) ref1 = 0.f;
  rows.sum[0] = rows.sum[1] = 0.f;
#pragma unroll
  for (int i = 0; i < Tile::kHeadDimV / 2; ++i) o[i] = 0.f;
#pragma unroll 1
  for (int number = 0; number < part.count; ++number) {
    const float4* from = part_memory(part, number);
    const float4 ends = __ldcg(from);
    const float factor0 = ptx::ex2(ends.x - ref0), factor1 = ptx::ex2(ends.y - ref1);
    rows.sum[0] = fmaf(ends.z, factor0, rows.sum[0]);
    rows.sum[1] = fmaf(ends.w, factor1, rows.sum[1]);
#pragma unroll
    for (int i = 0; i < Tile::kHeadDimV / 8; ++i) {
      const float4 v = __ldcg(from + (i + 1) * 128 * Tile::kWarpgroups);
      o[4 * i] = fmaf(v.x, factor0, o[4 * i]);
      o[4 * i + 1] = fmaf(v.y, factor0, o[4 * i + 1]);
      o[4 * i + 2] = fmaf(v.z, factor1, o[4 * i + 2]);
      o[4 * i + 3] = fmaf(v.w, factor1, o[4 * i + 3]);
    }
  }
}

}  // namespace flash_cuda::sm90
