// Producer of the forward kernel: layout of shared memory, order of tiles, copies of Q, K and V.
#pragma once

#include "common/mask.h"
#include "common/pipeline.cuh"
#include "common/tma_rows.cuh"
#include "ptx/cluster.h"
#include "ptx/fence.h"
#include "ptx/shared.h"
#include "ptx/tma.h"
#include "sm90/fwd_args.h"
#include "sm90/fwd_tile.h"
#include "sm90/tile_counter.h"

namespace flash_cuda::sm90 {

constexpr int kWorkSlots = 2;
// The producer's warps: 0 loads, 1 draws tiles, the others store, where Tile::kStoresApart, or 2
// loads Q, where Tile::kLoadsQApart.
constexpr int kFirstStoreWarp = 2, kQWarp = 2;

// Zero between launches; see tile_counter.h for who uses which.
static __device__ int tile_counters[kTileCounters];
__device__ __forceinline__ int* tile_counter(int index) { return &tile_counters[index]; }

template <class Tile>
using FwdSlot = FwdWorkSlot<Tile::has(kTrimBlocks) ? Tile::kWarpgroups : 1>;

// Addresses of everything in shared memory.
template <class Tile>
struct FwdSmem {
  uint32_t base;

  __device__ __forceinline__ uint32_t q(int warpgroup) const {
    return base + Tile::kSmemQ + warpgroup * Tile::kQSliceBytes;
  }
  __device__ __forceinline__ uint32_t out(int warpgroup) const {
    return base + Tile::kSmemOut + warpgroup * Tile::kOutSliceBytes;
  }
  // The stage of the count-th block.
  __device__ __forceinline__ uint32_t k(uint32_t count) const {
    return base + Tile::kSmemK + count % Tile::kStages * Tile::kStageBytesK;
  }
  __device__ __forceinline__ uint32_t v(uint32_t count) const {
    return base + Tile::kSmemV + count % Tile::kStages * Tile::kStageBytesV;
  }

  __device__ __forceinline__ uint32_t bias(uint32_t count, int warpgroup) const {
    return base + Tile::kSmemBias +
           (count % Tile::kBiasStages * Tile::kWarpgroups + warpgroup) * Tile::kBiasSliceBytes;
  }

  using Ring = RingBarriers<Tile::kStages>;
  using BiasRing = RingBarriers<Tile::kBiasStages>;
  using WorkRing = RingBarriers<kWorkSlots>;
  using QRing = RingBarriers<1>;
  static constexpr int kKAt = Tile::kSmemBarriers;
  // Where Tile::kLooksAhead, what has the same turn has the same barriers.
  static constexpr int kVAt = Tile::kLooksAhead ? kKAt : kKAt + Ring::kBytes;
  static constexpr int kWorkBarriersAt = kVAt + Ring::kBytes;
  static constexpr int kQAt = kWorkBarriersAt + WorkRing::kBytes;
  static constexpr int kDrawAt = kQAt + QRing::kBytes * Tile::kWarpgroups;
  static constexpr int kBiasAt = kDrawAt + 8;
  static constexpr int kOutAt = kBiasAt + BiasRing::kBytes;
  static constexpr int kExactAt = kOutAt + QRing::kBytes * Tile::kWarpgroups;
  static constexpr int kJoinsAt = kExactAt + 4 * Tile::kWarpgroups;
  static constexpr int kMailAt = (kJoinsAt + 4 * Tile::kWarpgroups + 7) / 8 * 8;
  static constexpr int kSlotsAt = (kMailAt + 24 + 15) / 16 * 16;
  static_assert(kSlotsAt + kWorkSlots * sizeof(FwdSlot<Tile>) <=
                Tile::kSmemBarriers + Tile::kBarrierBytes);

  __device__ __forceinline__ Ring k_ring() const { return {base + kKAt}; }
  __device__ __forceinline__ Ring v_ring() const { return {base + kVAt}; }
  // In step with the K ring.
  __device__ __forceinline__ BiasRing bias_ring() const { return {base + kBiasAt}; }
  __device__ __forceinline__ WorkRing work_ring() const { return {base + kWorkBarriersAt}; }
  __device__ __forceinline__ QRing q_ring(int warpgroup) const {
    return {base + kQAt + QRing::kBytes * warpgroup};
  }
  // A phase for every part of O that a warpgroup has staged, where Tile::kStoresApart.
  __device__ __forceinline__ QRing out_ring(int warpgroup) const {
    return {base + kOutAt + QRing::kBytes * warpgroup};
  }
  __device__ __forceinline__ FwdSlot<Tile>& slot(uint32_t count) const {
    return *ptx::shared_pointer<FwdSlot<Tile>>(base + kSlotsAt +
                                               count % kWorkSlots * sizeof(FwdSlot<Tile>));
  }
  // Block from which on a warpgroup wants exact softmax; see Consumer::ask_for_exact.
  __device__ __forceinline__ uint32_t exact_from(int warpgroup) const {
    return base + kExactAt + 4 * warpgroup;
  }
  // kShareTail: whether a warpgroup has left the last part of its tile.
  __device__ __forceinline__ uint32_t joins(int warpgroup) const {
    return base + kJoinsAt + 4 * warpgroup;
  }
  // A phase a tile, completed shortly before its copies end.
  __device__ __forceinline__ uint32_t draw_barrier() const { return base + kDrawAt; }
  // Of a pair: where the second block learns what the first one drew.
  __device__ __forceinline__ uint32_t mail_full() const { return base + kMailAt; }
  __device__ __forceinline__ uint32_t mail_empty() const { return base + kMailAt + 8; }
  __device__ __forceinline__ uint32_t mail() const { return base + kMailAt + 16; }
};

template <class Tile>
__device__ __forceinline__ void init_barriers(const FwdSmem<Tile>& smem) {
  // K, or a turn, is released by every warp after its own check of the sums, V by every warpgroup;
  // of a pair, at the block that copies it.
  smem.k_ring().init(1, 4 * Tile::kWarpgroups * Tile::kCluster);
  if (!Tile::kLooksAhead) smem.v_ring().init(1, Tile::kWarpgroups * Tile::kCluster);
  if (Tile::has(kPair)) {
    ptx::mbarrier_init(smem.mail_full(), 1);
    ptx::mbarrier_init(smem.mail_empty(), 1);
  }
  const int readers = Tile::kStoresApart ? Tile::kWarpgroups : Tile::kLoadsQApart ? 1 : 0;
  smem.work_ring().init(1, 4 * Tile::kWarpgroups + 1 + readers);
  for (int w = 0; w < Tile::kWarpgroups; ++w) {
    smem.q_ring(w).init(1, 4);
    smem.out_ring(w).init(4, 1);
    ptx::store_shared(smem.exact_from(w), ~0u);
  }
  ptx::mbarrier_init(smem.draw_barrier(), 1);
  if (Tile::has(kGeneral)) smem.bias_ring().init(1, 4 * Tile::kWarpgroups);
  ptx::fence_mbarrier_init();
}

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
  const BlockRange all = neighbours ? mask.kv_blocks(work.q_block / 2 * 2 * Tile::kBlockQ,
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
  FwdWork work = dense_work(args.params, args.q_blocks, args.section, index, args.joined_from);
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
  FwdWork work = dense_work(args.params, args.q_blocks / 2, args.section, index, args.joined_from);
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

// Where a sequence's rows are; the maps of packed ones are always clipped.
template <class Tile>
__device__ __forceinline__ MapRows locate(const RowMap& rows, int first, int len, int head,
                                          int batch) {
  if constexpr (Tile::has(kPacked)) return RowMap::packed(first, len, head);
  return rows.locate(first, len, head, batch);
}

// Stores a part of O that `warpgroup` has staged, from row `row` of the sequence on.
template <class Tile>
__device__ __forceinline__ void store_part(const FwdSmem<Tile>& smem, const FwdArgs& args,
                                           int warpgroup, int part, int row, const MapRows& at) {
  constexpr int kPanels = Tile::kPanelsV / Tile::kOutParts;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    store_rows<!Tile::has(kDense)>(&args.out_map,
                                   smem.out(warpgroup) + panel * 64 * Tile::kPanelBytes,
                                   (part * kPanels + panel) * Tile::kPanelCols, row, at);
  }
  ptx::bulk_commit_group();
}

// Stores the tiles of `warpgroup`, which goes on meanwhile; one thread.
template <class Tile>
__device__ __forceinline__ void store_tiles(const FwdSmem<Tile>& smem, const FwdArgs& args,
                                            int warpgroup) {
  const auto work_ring = smem.work_ring();
  const auto ring = smem.out_ring(warpgroup);
  for (uint32_t tiles = 0;; ++tiles) {
    work_ring.wait_full(tiles);
    const FwdWork w = smem.slot(tiles).work;
    ptx::mbarrier_arrive(work_ring.empty(tiles));
    if (w.q_block < 0) break;
    const MapRows at = locate<Tile>(args.out_rows, w.q_row0, w.seqlen_q_slot, w.head, w.batch);
#pragma unroll
    for (int part = 0; part < Tile::kOutParts; ++part) {
      const uint32_t count = tiles * Tile::kOutParts + part;
      ring.wait_full(count);
      store_part(smem, args, warpgroup, part, w.q_block * Tile::kBlockQ + 64 * warpgroup, at);
      ptx::bulk_wait_group_read<0>();
      ptx::mbarrier_arrive(ring.empty(count));
    }
  }
  // The copy engine still reads this block's shared memory.
  ptx::bulk_wait_group<0>();
}

// Loads Q, K and V of every tile; one thread, or another one for Q.
template <class Tile>
struct Loader {
  static constexpr bool kMayClip = !Tile::has(kDense);
  const FwdSmem<Tile>& smem;
  const FwdArgs& args;
  uint32_t k_count = 0, v_count = 0, bias_count = 0, tiles = 0;
  int idle = 0;  // warpgroups that take no part in the tile

  // Whether this block copies what block `rank` of a pair does.
  static __device__ __forceinline__ bool is_mine(int rank) {
    return !Tile::has(kPair) || static_cast<int>(ptx::cluster_block_rank()) == rank;
  }
  // A stage of K or V: for this block, or for both of a pair.
  static __device__ __forceinline__ void expect_stage(uint32_t full, int bytes) {
    ptx::mbarrier_arrive_expect_tx(full, bytes);
    if constexpr (Tile::has(kPair)) {
      ptx::mbarrier_arrive_expect_tx_cluster(ptx::mapa(full, ptx::cluster_block_rank() ^ 1), bytes);
    }
  }
  static __device__ __forceinline__ void load_panel(uint32_t dst, const CUtensorMap* map,
                                                    uint32_t full, int panel, int kv_block,
                                                    const MapRows& rows) {
    dst += panel * Tile::kBlockKV * Tile::kPanelBytes;
    const int column = panel * Tile::kPanelCols, row = kv_block * Tile::kBlockKV;
    if constexpr (Tile::has(kPair)) {
      load_rows_multicast<kMayClip>(dst, map, full, column, row, rows, 3, ptx::kEvictLast);
    } else {
      load_rows<kMayClip>(dst, map, full, column, row, rows, ptx::kEvictLast);
    }
  }
  // In place of idle warpgroups, where they do not pass over K and V themselves.
  __device__ __forceinline__ void give_up(uint32_t empty, int arrivals) {
    if (!Tile::has(kRagged) || Tile::kLooksAhead || idle == 0) return;
    ptx::mbarrier_arrive(empty, idle * arrivals);
  }
  __device__ __forceinline__ void copy_k(int kv_block, const MapRows& rows, uint32_t full) {
    const uint32_t dst = smem.k(k_count);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanelsQK; ++panel) {
      load_panel(dst, &args.k_map, full, panel, kv_block, rows);
    }
    ++k_count;
  }
  __device__ __forceinline__ void copy_v(int kv_block, const MapRows& rows, uint32_t full) {
    const uint32_t dst = smem.v(v_count);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanelsV; ++panel) {
      load_panel(dst, &args.v_map, full, panel, kv_block, rows);
    }
    ++v_count;
  }
  __device__ __forceinline__ void load_k(int kv_block, const MapRows& rows) {
    if (!is_mine(Tile::kLoadsK)) return;
    const auto ring = smem.k_ring();
    const uint32_t full = ring.full(k_count);
    ring.wait_empty(k_count);
    expect_stage(full, Tile::kStageBytesK);
    give_up(ring.empty(k_count), 4);
    copy_k(kv_block, rows, full);
    // A tile's first K has its turn for itself, as has its last V.
    if (Tile::kLooksAhead) ++v_count;
  }
  __device__ __forceinline__ void load_v(int kv_block, const MapRows& rows) {
    if (!is_mine(Tile::kLoadsV)) return;
    const auto ring = smem.v_ring();
    const uint32_t full = ring.full(v_count);
    ring.wait_empty(v_count);
    expect_stage(full, Tile::kStageBytesV);
    give_up(ring.empty(v_count), 1);
    copy_v(kv_block, rows, full);
    if (Tile::kLooksAhead) ++k_count;
  }
  // K of a block and V of the one after it.
  __device__ __forceinline__ void load_turn(int kv_block, const MapRows& rows) {
    if (!Tile::kLooksAhead) {
      load_k(kv_block, rows);
      load_v(kv_block + 1, rows);
      return;
    }
    const auto ring = smem.k_ring();
    const uint32_t full = ring.full(k_count);
    ring.wait_empty(k_count);
    ptx::mbarrier_arrive_expect_tx(full, Tile::kStageBytesK + Tile::kStageBytesV);
    copy_k(kv_block, rows, full);
    copy_v(kv_block + 1, rows, full);
  }
  // General variant, where the map serves. A row for all queries is copied once.
  __device__ __forceinline__ void load_bias(const FwdWork& w, int kv_block) {
    if (!Tile::has(kGeneral) || args.bias_rows == 0) return;
    const FwdParams& p = args.params;
    const int slices = args.bias_rows == 1 ? 1 : Tile::kWarpgroups;
    const int panels = p.bias_dtype == DType::kFloat32 ? 2 : 1;
    const int head = p.bias_head_stride ? w.head : 0, batch = p.bias_batch_stride ? w.batch : 0;
    // Read once, or by the tiles of several heads or batches.
    const uint64_t policy =
        p.bias_head_stride && p.bias_batch_stride ? ptx::kEvictFirst : ptx::kEvictNormal;
    const auto ring = smem.bias_ring();
    ring.wait_empty(bias_count);
    const uint32_t full = ring.full(bias_count);
    ptx::mbarrier_arrive_expect_tx(full, slices * panels * args.bias_rows * 128);
    for (int slice = 0; slice < slices; ++slice) {
      const int row = args.bias_rows == 1 ? 0 : w.q_block * Tile::kBlockQ + 64 * slice;
      for (int panel = 0; panel < panels; ++panel) {
        ptx::tma_load_4d(smem.bias(bias_count, slice) + panel * Tile::kBiasPanelBytes,
                         &args.bias_map, full, kv_block * Tile::kBlockKV + 32 * panel, row, head,
                         batch, policy);
      }
    }
    ++bias_count;
  }
  __device__ __forceinline__ void load_q(const FwdWork& work) {
    const int first_row = tile_row<Tile>(args, work.q_block);
    const int with_rows = warpgroups_with_rows<Tile>(args, work);
    const MapRows rows =
        locate<Tile>(args.q_rows, work.q_row0, work.seqlen_q, work.head, work.batch);
#pragma unroll
    for (int w = 0; w < Tile::kWarpgroups; ++w) {
      const auto ring = smem.q_ring(w);
      const uint32_t full = ring.full(tiles);
      ring.wait_empty(tiles);
      if (w >= with_rows) {
        ptx::mbarrier_arrive(full);
        continue;
      }
      ptx::mbarrier_arrive_expect_tx(full, Tile::kQSliceBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanelsQK; ++panel) {
        load_rows<kMayClip>(smem.q(w) + panel * 64 * Tile::kPanelBytes, &args.q_map, full,
                            panel * Tile::kPanelCols, first_row + 64 * w, rows, ptx::kEvictFirst);
      }
    }
  }

  __device__ __forceinline__ void run_q() {
    const auto work_ring = smem.work_ring();
    for (;; ++tiles) {
      work_ring.wait_full(tiles);
      const FwdWork work = smem.slot(tiles).work;
      ptx::mbarrier_arrive(work_ring.empty(tiles));
      if (work.q_block < 0) return;
      load_q(work);
    }
  }

  __device__ __forceinline__ void run() {
    const FwdParams& p = args.params;
    const auto work_ring = smem.work_ring();
    const int group = p.num_heads_q / p.num_heads_kv;
    for (;; ++tiles) {
      work_ring.wait_full(tiles);
      const auto& slot = smem.slot(tiles);
      const FwdWork w = slot.work;
      const int begin = slot.kv_begin, end = slot.kv_end;
      ptx::mbarrier_arrive(work_ring.empty(tiles));
      if (w.q_block < 0) return;
      const bool empty = end <= begin;
      idle = Tile::kWarpgroups - warpgroups_with_rows<Tile>(args, w);
      const MapRows kv =
          locate<Tile>(args.kv_rows, w.kv_row0, w.seqlen_kv, w.head / group, w.batch);
      if (!empty) {
        load_k(end - 1, kv);
        load_bias(w, end - 1);
      }
      if (!Tile::kLoadsQApart) load_q(w);
      // The ring still holds blocks to compute while the next tile is drawn.
      if (end - begin < 2) ptx::mbarrier_arrive(smem.draw_barrier());
#pragma unroll 1
      for (int kv_block = end - 2; kv_block >= begin; --kv_block) {
        if (kv_block == begin) ptx::mbarrier_arrive(smem.draw_barrier());
        load_turn(kv_block, kv);
        load_bias(w, kv_block);
      }
      if (!empty) load_v(begin, kv);
    }
  }
};

}  // namespace flash_cuda::sm90
