// Which tile a block computes next: a warp draws tiles and says which KV blocks warpgroups walk.
#pragma once

#include "common/mask.h"
#include "ptx/cluster.h"
#include "ptx/shared.h"
#include "sm90/fwd_smem.cuh"
#include "sm90/tile_counter.h"

namespace flash_cuda::sm90 {

// Zero between launches; see tile_counter.h for who uses which.
static __device__ int tile_counters[kTileCounters];
__device__ __forceinline__ int* tile_counter(int index) { return &tile_counters[index]; }

// First row of a tile.
template <class Tile>
__device__ __forceinline__ int tile_row(const FwdArgs& args, int q_block) {
  const int row = q_block * Tile::kBlockQ;
  if (!Tile::kShiftsRows) return row;
  if (Tile::has(kTrimBlocks)) return max(row - args.missing_rows, 0);
  return row - 64 * max(q_block - args.tall_tiles, 0);
}

// Who takes part in a tile: the first warpgroup, at least.
template <class Tile>
__device__ __forceinline__ int warpgroups_with_rows(const FwdArgs& args, const FwdWork& work) {
  constexpr int kAll = Tile::kWarpgroups;
  if (!Tile::has(kRagged)) return kAll;
  int count = ceil_div(work.seqlen_q_slot - tile_row<Tile>(args, work.q_block), 64);
  if (Tile::kShiftsRows && Tile::has(kTrimBlocks)) {
    if (work.q_block == 0) count = kAll - args.missing_rows / 64;
  } else if (Tile::kShiftsRows && work.q_block >= args.tall_tiles) {
    count = min(count, kAll - 1);
  }
  return min(count, kAll);
}

// Says in `slot` what the work is and which blocks each warpgroup (any of them, if all do the same)
// walks.
template <class Tile>
__device__ __forceinline__ void fill_slot(FwdSlot<Tile>& slot, const FwdArgs& args,
                                          const FwdWork& work) {
  const FwdParams& params = args.params;
  slot.work = work;
  const Mask mask = Mask::make(params, work.seqlen_q, work.seqlen_kv);
  const bool all_exact = Tile::has(kGeneral) || params.strict;
  const int q_begin = tile_row<Tile>(args, work.q_block);
  const bool neighbours = Tile::has(kPair) && !args.pair_heads;
  const BlockRange own_block = mask.kv_blocks(q_begin, Tile::kBlockQ, Tile::kBlockKV);
  const BlockRange all = neighbours ? mask.kv_blocks(tile_row<Tile>(args, work.q_block / 2 * 2),
                                                     2 * Tile::kBlockQ, Tile::kBlockKV)
                                    : own_block;
  slot.kv_begin = all.begin;
  slot.kv_end = all.end;
#pragma unroll 1
  for (int w = 0; w < slot.kWalks; ++w) {
    BlockRange range = own_block;
    int first_row = q_begin;
    if constexpr (Tile::has(kTrimBlocks)) {
      const BlockRange own = mask.kv_blocks(q_begin + 64 * w, 64, Tile::kBlockKV);
      if (own.end > own.begin) {
        range = own;
        first_row += 64 * w;
      }
    }
    // Exact blocks come first: down to where every row has seen a key, and has a reference.
    const int exact_begin =
        min(range.full_end, ceil_div(mask.kv_end(first_row), Tile::kBlockKV) - 1);
    FwdWalk walk{range.begin, range.end, range.full_begin, range.full_end};
    walk.exact_begin = all_exact ? range.begin : max(exact_begin, range.begin);
    walk.skip_right = slot.kv_end - range.end;
    walk.skip_left = range.begin - slot.kv_begin;
    slot.walks[w] = walk;
  }
}

template <class Tile>
__device__ __forceinline__ void publish(const FwdSmem<Tile>& smem, const FwdArgs& args,
                                        uint32_t count, const FwdWork& work) {
  const auto ring = smem.work_ring();
  fill_slot<Tile>(smem.slot(count), args, work);
  ptx::mbarrier_arrive(ring.full(count));
}

// No more work.
template <class Tile>
__device__ __forceinline__ void publish_end(const FwdSmem<Tile>& smem, uint32_t count) {
  const auto ring = smem.work_ring();
  smem.slot(count).work = FwdWork::none();
  ptx::mbarrier_arrive(ring.full(count));
}

// The next index of this block, or pair; the last of all draws resets the counter.
template <class Tile>
__device__ __forceinline__ int draw(const FwdArgs& args, int num_tiles) {
  int* counter = tile_counter(args.counter);
  const int drawn = atomicAdd(counter, 1);
  if (drawn == num_tiles - 1) *counter = 0;
  return drawn + gridDim.x / Tile::kCluster;
}

// Until the `count`-th tile is about to end and there is a slot for the next one.
template <class Tile>
__device__ __forceinline__ void wait_to_publish(const FwdSmem<Tile>& smem, uint32_t count) {
  ptx::mbarrier_wait(smem.draw_barrier(), count % 2);
  smem.work_ring().wait_empty(count + 1);
}

// The tile after the `count`-th. Not before that one is about to end: who takes the next one early
// keeps it from others that are free by then.
template <class Tile>
__device__ __forceinline__ int draw_in_time(const FwdSmem<Tile>& smem, const FwdArgs& args,
                                            int num_tiles, uint32_t count) {
  wait_to_publish(smem, count);
  return draw<Tile>(args, num_tiles);
}

__device__ __forceinline__ FwdWork dense_work(const FwdArgs& args, int index) {
  FwdWork work =
      dense_work(args.params, args.q_blocks, args.section, index, args.joined_from, args.held_back);
  if (args.lowest_last) work.q_block = args.q_blocks - 1 - work.q_block;
  return work;
}

// Draws tiles and publishes them; one thread.
template <class Tile>
__device__ __forceinline__ void schedule_dense(const FwdSmem<Tile>& smem, const FwdArgs& args) {
  const int num_tiles = args.num_tiles;
  uint32_t tiles = 0;
  for (int index = blockIdx.x; index < num_tiles; ++tiles) {
    publish(smem, args, tiles, dense_work(args, index));
    index = draw_in_time(smem, args, num_tiles, tiles);
  }
  publish_end(smem, tiles);
}

// Which of the tiles of pair `index` block `rank` computes. Of neighbours the later one, which sees
// more keys below a diagonal, goes round.
__device__ __forceinline__ FwdWork pair_work(const FwdArgs& args, int index, int rank,
                                             uint32_t tiles) {
  if (args.pair_heads) return dense_work(args, 2 * index + rank);
  FwdWork work = dense_work(args.params, args.q_blocks / 2, args.section, index, args.joined_from,
                            args.held_back / 2);
  if (args.lowest_last) work.q_block = args.q_blocks / 2 - 1 - work.q_block;
  work.q_block = 2 * work.q_block + (rank ^ static_cast<int>(tiles % 2));
  return work;
}

// The same for pairs: the first block draws and tells the second.
template <class Tile>
__device__ __forceinline__ void schedule_pairs(const FwdSmem<Tile>& smem, const FwdArgs& args) {
  const int rank = static_cast<int>(ptx::cluster_block_rank());
  uint32_t tiles = 0;
  for (int index = blockIdx.x / 2; index < args.num_tiles; ++tiles) {
    publish(smem, args, tiles, pair_work(args, index, rank, tiles));
    if (rank == 0) {
      index = draw_in_time(smem, args, args.num_tiles, tiles);
      ptx::mbarrier_wait(smem.mail_empty(), (tiles + 1) % 2);
      ptx::store_cluster_async_4(ptx::mapa(smem.mail(), 1), index, ptx::mapa(smem.mail_full(), 1));
    } else {
      ptx::mbarrier_arrive_expect_tx(smem.mail_full(), 4);
      ptx::mbarrier_wait(smem.mail_full(), tiles % 2);
      index = static_cast<int>(ptx::load_shared(smem.mail()));
      ptx::mbarrier_arrive_cluster(ptx::mapa(smem.mail_empty(), 0));
      smem.work_ring().wait_empty(tiles + 1);
    }
  }
  publish_end(smem, tiles);
}

// The same for packed sequences; one warp.
template <class Tile>
__device__ __forceinline__ void schedule_packed(const FwdSmem<Tile>& smem, const FwdArgs& args) {
  PackedTiles packed{args.params, Tile::kBlockQ, static_cast<int>(threadIdx.x % 32)};
  const int num_tiles = packed.count();
  uint32_t tiles = 0;
  for (int index = blockIdx.x; index < num_tiles; ++tiles) {
    const FwdWork work = packed.find(index);
    if (packed.lane == 0) {
      publish(smem, args, tiles, work);
      index = draw_in_time(smem, args, num_tiles, tiles);
    }
    index = __shfl_sync(~0u, index, 0);
  }
  if (packed.lane == 0) publish_end(smem, tiles);
}

}  // namespace flash_cuda::sm90
