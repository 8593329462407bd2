// The warps that move data: loads, dQ sums and stores; and the drawing of tasks.
#pragma once

#include <type_traits>

#include "common/tma_rows.cuh"
#include "ptx/fence.h"
#include "ptx/griddep.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/smem_addr.h"
#include "ptx/tma.h"
#include "sm90/bwd_bias_tile.cuh"
#include "sm90/bwd_convert.cuh"
#include "sm90/bwd_smem.cuh"
#include "sm90/tile_counter.h"

namespace flash_cuda::sm90 {

// A dense tensor's rows, or where maps are clipped those of a sequence.
template <bool kClipped>
__device__ __forceinline__ MapRows bwd_rows(const RowMap& map, int first, int len, int head,
                                            int batch) {
  if constexpr (kClipped) return map.locate(first, len, head, batch);
  return {first, head, batch, false};
}

// One thread: K or V.
template <class Tile, bool kClipped>
__device__ __forceinline__ void bwd_load_keys(const CUtensorMap& map, const RowMap& rows,
                                              const BwdTask<Tile>& task, uint32_t tile,
                                              uint32_t bar) {
  const MapRows at =
      bwd_rows<kClipped>(rows, task.kv_row0, task.mask.seqlen_kv, task.kv_head, task.kv_batch);
  ptx::mbarrier_arrive_expect_tx(bar, BwdSmem<Tile>::kKvBytes);
#pragma unroll
  for (int p = 0; p < Tile::kPanels; ++p) {
    load_rows<kClipped>(tile + p * Tile::kBlockKV * 128, &map, bar, p * 64, task.kv0, at,
                        ptx::kEvictFirst);
  }
}

// One thread: the operands of every task.
template <class Tile, bool kClipped>
struct BwdLoader {
  using Smem = BwdSmem<Tile>;
  const BwdArgs& args;
  const BwdMaps& maps;
  const BwdRowMaps& row_maps;
  const uint32_t smem;

  // A block of Q or dO as an operand tile; lse2 or -delta of its rows follows.
  __device__ void load_tile(const CUtensorMap& map, uint32_t tile, uint32_t bar, int row,
                            const MapRows& at) const {
    ptx::mbarrier_arrive_expect_tx(bar, Smem::kQBytes + Smem::kRowBytes);
#pragma unroll
    for (int p = 0; p < Tile::kPanels; ++p) {
      load_rows<kClipped>(tile + p * Tile::kBlockQ * 128, &map, bar, p * 64, row, at,
                          ptx::kEvictLast);
    }
  }

  __device__ void load_k(const BwdTask<Tile>& task, KeyPlace<Tile>& keys) const {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    ptx::mbarrier_wait(bars.k_empty(keys.slot()), keys.phase() ^ 1);
    bwd_load_keys<Tile, kClipped>(maps.k, row_maps.k, task,
                                  smem + Smem::kK + keys.slot() * Smem::kKvBytes,
                                  bars.k_full(keys.slot()));
    keys.next();
  }

  // What a step streams. Before lse2 and delta of the first one come V, and K if it has but one
  // buffer.
  template <bool kFirst, class Keys>
  __device__ void load_step(const BwdTask<Tile>& task, const BwdSteps<Tile>& at, int q_row0,
                            int seqlen_q, int head, int batch, int64_t work_row, RingPlace& ring,
                            const Keys& load_kv) const {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    const int q0 = at.q_block * Tile::kBlockQ, stage = ring.slot;
    const auto load_lse = [&] {
      ptx::bulk_load(smem + Smem::kLse + stage * Smem::kRowBytes, args.work.lse2 + work_row,
                     Smem::kRowBytes, bars.q_full(stage));
    };
    ptx::mbarrier_wait(bars.q_empty(stage), ring.phase ^ 1);  // the buffers start empty
    load_tile(maps.q, smem + Smem::kQ + stage * Smem::kQBytes, bars.q_full(stage), q0,
              bwd_rows<kClipped>(row_maps.q, q_row0, seqlen_q, head, batch));
    if constexpr (!kFirst) load_lse();
    ptx::mbarrier_wait(bars.dout_empty(stage), ring.phase ^ 1);
    load_tile(maps.dout, smem + Smem::kDout + stage * Smem::kQBytes, bars.dout_full(stage), q0,
              bwd_rows<kClipped>(row_maps.dout, q_row0, seqlen_q, head, batch));
    if constexpr (kFirst) {
      load_kv();
      ptx::griddep_wait();  // what follows comes from the pre-pass
      load_lse();
    }
    ptx::bulk_load(smem + Smem::kDelta + stage * Smem::kRowBytes, args.work.delta + work_row,
                   Smem::kRowBytes, bars.dout_full(stage));
    if constexpr (Tile::kBiasStages > 0)
      bwd_load_bias<Tile>(args, maps, task, smem, ring, head, q0);
    ring.next();
  }

  __device__ void run(const BwdTask<Tile>& task, RingPlace& ring, KeyPlace<Tile>& keys) const {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    const int q_row0 = task.q_row0, batch = task.q_batch, head0 = task.first_q_head();
    const int base = task.row_block_base, seqlen_q = kClipped ? task.mask.seqlen_q : 0;
    const int draw_at = min_of(task.num_steps(), args.draw_at);
    const auto load_kv = [&] {
      // V is free once the last step before this task has let go of its dO.
      RingPlace other = ring;
      other.next();
      ptx::mbarrier_wait(bars.dout_empty(other.slot), other.phase ^ 1);
      bwd_load_keys<Tile, kClipped>(maps.v, row_maps.v, task, smem + Smem::kV, bars.v_full());
      if (Tile::kKBuffers == 1) load_k(task, keys);
    };
    BwdSteps<Tile> at(task);
    const auto step = [&](auto first) {
      const int head = head0 + at.group;
      const int64_t work_row = (head * args.work.row_blocks + base + at.q_block) * Tile::kBlockQ;
      if (at.left == draw_at) ptx::mbarrier_arrive(bars.near_end());
      load_step<decltype(first)::value>(task, at, q_row0, seqlen_q, head, batch, work_row, ring,
                                        load_kv);
      at.next();
    };
    if (Tile::kKBuffers == 2) load_k(task, keys);
    step(std::true_type{});
#pragma unroll 1
    while (at.left > 0) step(std::false_type{});
  }
};

// Warp 0 of the first warpgroup, one thread: loads the operands of every task; those of the first
// one that the call was given, while the pre-pass still runs.
template <class Tile, bool kConvert>
__device__ __forceinline__ void bwd_load(const BwdArgs& args, const BwdMaps& maps,
                                         const BwdRowMaps& row_maps, uint32_t smem,
                                         uint8_t* smem_ptr) {
  const BwdBarriers<Tile> bars{smem + BwdSmem<Tile>::kBarriers};
  RingPlace rows;
  KeyPlace<Tile> keys;
  for (RingPlace tasks;; tasks.next()) {
    ptx::mbarrier_wait(bars.task_full(tasks.slot), tasks.phase);
    const BwdTask<Tile>& task = bwd_task_at<Tile>(smem_ptr, tasks.slot);
    if (task.none) return;
    if (task.num_steps() == 0) {
      ptx::mbarrier_arrive(bars.near_end());
    } else if (kConvert && task.convert) {
      if constexpr (kConvert) bwd_load_sums(args, task, smem, rows);
    } else {
      if (row_maps.q.clipped || row_maps.k.clipped) {
        BwdLoader<Tile, true>{args, maps, row_maps, smem}.run(task, rows, keys);
      } else {
        BwdLoader<Tile, false>{args, maps, row_maps, smem}.run(task, rows, keys);
      }
    }
    ptx::mbarrier_arrive(bars.task_empty(tasks.slot));
  }
}

// One thread: zeroes a task's part of the dQ sums of a section that is yet to come, if there is
// one. They go to the L2 cache and are added to before they would leave it, which saves writing and
// reading them.
template <class Tile>
__device__ __forceinline__ void bwd_zero_sums(const BwdArgs& args, const BwdTask<Tile>& task,
                                              uint32_t smem) {
  using Smem = BwdSmem<Tile>;
  if (task.section + args.sections_ahead >= args.num_sections) return;
  const ItemRange items = items_to_zero(args, task);
#pragma unroll 1
  for (int item = items.begin; item < items.end; ++item) {
    char* const sums =
        reinterpret_cast<char*>(args.work.dq) + args.row_block_number(item) * Smem::kDqBytes;
#pragma unroll
    for (int i = 0; i < Smem::kDqBytes; i += Smem::kZeroBytes) {
      ptx::bulk_store(sums + i, smem + Smem::kZeros, Smem::kZeroBytes, ptx::kEvictLast);
    }
  }
  ptx::bulk_commit_group();
  ptx::bulk_wait_group<0>();
  ptx::fence_proxy_async_global();
  ptx::add_release(args.work.zeroed + task.section + args.sections_ahead, 1);
}

// Zero between launches; see tile_counter.h for who uses which.
static __device__ int bwd_counters[kTileCounters];

// Warp 3: draws tasks, the next one shortly before the end of one, early enough to load K and V
// without a gap, late enough that no task waits long for a block that is busy; and zeroes sums.
// Tasks are drawn in order also at first, so that whatever a task waits for in deterministic mode
// is running or done, or waits only for such.
template <class Tile, bool kShare>
__device__ __forceinline__ void bwd_draw(const BwdArgs& args, uint32_t smem, uint8_t* smem_ptr) {
  using Smem = BwdSmem<Tile>;
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const int lane = threadIdx.x % 32;
  for (int i = lane; i < Smem::kZeroBytes / 16; i += 32) {
    reinterpret_cast<uint4*>(smem_ptr + Smem::kZeros)[i] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async_shared();
  __syncwarp();
  if (args.work.sequences) ptx::griddep_wait();  // in the order that the pre-pass works out
  int index = 0;
  bool second = false;
  for (RingPlace tasks;; tasks.next()) {
    BwdTask<Tile>& task = bwd_task_at<Tile>(smem_ptr, tasks.slot);
    if (lane == 0) {
      ptx::mbarrier_wait(bars.near_end(), tasks.slot ^ 1);
      ptx::mbarrier_wait(bars.task_empty(tasks.slot), tasks.phase ^ 1);
      do {
        if (!second) index = atomicAdd(bwd_counters + args.counter, 1);
        task.none = index >= args.num_draws;
        if (task.none) {
          const int last = args.num_draws + static_cast<int>(gridDim.x) - 1;  // of all draws
          if (index == last) bwd_counters[args.counter] = 0;
          break;
        }
        second = bwd_task<Tile, kShare>(args, index, second, task);
      } while (task.kv0 >= task.kv_slot_end);  // a spare block of a packed batch
      ptx::mbarrier_arrive(bars.task_full(tasks.slot));
      ptx::griddep_wait();  // the pre-pass clears what counts the zeroing
      if (!task.none && !task.convert && args.sections_ahead) bwd_zero_sums(args, task, smem);
    }
    __syncwarp();
    if (task.none) return;
  }
}

// Warps 1 and 2 empty the staging buffer in turns: every block of dQ is added to the workspace, and
// at the end of a task dV and dK are stored. So each has the time of two steps for a block, which
// deterministic mode needs. Where the warpgroups take turns at dQ, each has a store warp and a
// buffer of its own.
template <class Tile, bool kConvert>
struct BwdStore {
  using Smem = BwdSmem<Tile>;
  static constexpr int kDqFloats = Tile::kBlockQ * Tile::kHeadDim;
  static constexpr int kRows = Tile::kBlockKV / 2;  // of a warpgroup's dV or dK
  static constexpr bool kOwn = Tile::kDqInTurns;    // a buffer of its own
  const BwdArgs& args;
  const BwdRowMaps& row_maps;
  const uint32_t smem;
  uint8_t* const smem_ptr;
  const int me;  // 0 or 1
  int turn = 0;  // whose it is
  KeyPlace<Tile> keys{};
  __device__ static bool leader() { return threadIdx.x % 32 == 0; }
  __device__ bool my_turn() {
    turn ^= 1;
    return turn != me;
  }
  __device__ void wait_full() const { ptx::named_barrier_sync(kOutFull + me, kOwn ? 160 : 288); }
  // Lets the consumers rewrite the buffer, once the copy engine has read it.
  __device__ void hand_back() const {
    if (leader()) ptx::bulk_wait_group_read<0>();
    __syncwarp();
    for (int half = 0; half < 2; ++half) {
      if (!kOwn || half == me) ptx::named_barrier_arrive(kOutEmpty + half, 160);
    }
  }

  __device__ void add_dq(const BwdTask<Tile>& task) {
    const int head0 = task.first_q_head(), base = task.row_block_base;
    if (leader()) wait_zeroed(args, task.section);
#pragma unroll 1
    for (BwdSteps at(task); at.left > 0; at.next()) {
      if (!my_turn()) continue;
      const int64_t block = (head0 + at.group) * args.work.row_blocks + base + at.q_block;
      int* const dq_turn = args.work.dq_turn ? args.work.dq_turn + block : nullptr;
      // Here, not when its turn comes: beside the GEMMs reads of the task take long.
      const int mine = dq_turn ? task.turn(at.q_block) : 0;
      wait_full();
      if (leader()) {
        if (dq_turn) wait_for_turn(dq_turn, mine);
        ptx::bulk_reduce_add_f32(args.work.dq + block * kDqFloats,
                                 smem + Smem::kOut + (kOwn ? me * Smem::kOutBytes : 0),
                                 Smem::kDqBytes, ptx::kEvictLast);
        ptx::bulk_commit_group();
      }
      hand_back();
      if (leader() && dq_turn) {
        ptx::bulk_wait_group<0>();
        pass_turn(dq_turn, mine);
      }
      __syncwarp();
    }
  }

  // The rows of both warpgroups, in panels of 64 columns; the copy engine stops at the end of the
  // sequence. `in_k`: they lie in the place of K, which can then be loaded again.
  __device__ void store_out(const CUtensorMap& map, const RowMap& row_map, const void* out,
                            const BwdTask<Tile>& task, bool in_k) {
    if (!kOwn && !my_turn()) return;
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    if (in_k) {
      ptx::mbarrier_wait(bars.dv_full(keys.slot()), keys.phase());
    } else {
      wait_full();
    }
    if (out && task.stores[0] && leader()) {
      const MapRows at = row_map.locate(task.kv_row0, task.kv_slot_end, task.part, task.kv_batch);
      for (int half = 0; half < 2; ++half) {
        if (kOwn && half != me) continue;
        const int from = in_k
                             ? Smem::kK + keys.slot() * Smem::kKvBytes + half * (Smem::kKvBytes / 2)
                             : Smem::kOut + half * Smem::kOutBytes;
#pragma unroll
        for (int p = 0; p < Tile::kPanels; ++p) {
          store_rows(&map, smem + from + p * kRows * 128, p * 64, task.kv0 + half * kRows, at);
        }
      }
      ptx::bulk_commit_group();
    }
    if (in_k) {
      if (leader()) ptx::bulk_wait_group_read<0>();
      __syncwarp();
      ptx::mbarrier_arrive(bars.k_empty(keys.slot()));
    } else {
      hand_back();
    }
  }

  __device__ void run(const BwdMaps& maps) {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    const BwdParams& p = args.params;
    ptx::griddep_wait();  // the pre-pass zeroes the sums
    ptx::named_barrier_arrive(kOutEmpty + me, 160);
    for (RingPlace tasks;; tasks.next()) {
      ptx::mbarrier_wait(bars.task_full(tasks.slot), tasks.phase);
      const BwdTask<Tile>& task = bwd_task_at<Tile>(smem_ptr, tasks.slot);
      if (task.none) return;
      if (kConvert && task.convert) {
        turn ^= task.num_steps() & 1;  // nothing is staged
      } else {
        add_dq(task);
        const bool any = task.num_steps() > 0;
        store_out(maps.dv, row_maps.dv, p.dv, task, Tile::kDvInK && any);
        store_out(maps.dk, row_maps.dk, p.dk, task, false);
        if (any) keys.next();
        if (kConvert && args.conversions && leader()) {
          ptx::bulk_wait_group<0>();
          ptx::add_release(args.work.added + task.section, 1);
        }
        __syncwarp();
      }
      ptx::mbarrier_arrive(bars.task_empty(tasks.slot));
    }
  }
};

}  // namespace flash_cuda::sm90
