// The warps that move data: loads, tails, dQ sums and stores; and the drawing of tasks.
#pragma once

#include "ptx/fence.h"
#include "ptx/griddep.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/smem_addr.h"
#include "ptx/tma.h"
#include "sm90/bwd_bias_tile.cuh"
#include "sm90/bwd_convert.cuh"
#include "sm90/bwd_smem.cuh"

namespace flash_cuda::sm90 {

// One thread: K and V.
template <class Tile>
__device__ __forceinline__ void bwd_load_kv(const BwdMaps& maps, const BwdTask<Tile>& task,
                                            uint32_t smem) {
  using Smem = BwdSmem<Tile>;
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const uint32_t k_bar = task.kv_has_tail() ? bars.tail_k() : bars.kv_full();
  const uint32_t v_bar = task.kv_has_tail() ? bars.tail_v() : bars.kv_full();
  ptx::mbarrier_arrive_expect_tx(k_bar, Smem::kKvBytes);
  ptx::mbarrier_arrive_expect_tx(v_bar, Smem::kKvBytes);
#pragma unroll
  for (int p = 0; p < Tile::kPanels; ++p) {
    const int offset = p * Tile::kBlockKV * 128, row = task.kv_row0 + task.kv0;
    ptx::tma_load_4d(smem + Smem::kK + offset, &maps.k, k_bar, p * 64, row, task.kv_head,
                     task.kv_batch, ptx::kEvictFirst);
    ptx::tma_load_4d(smem + Smem::kV + offset, &maps.v, v_bar, p * 64, row, task.kv_head,
                     task.kv_batch, ptx::kEvictFirst);
  }
}

// One thread: a block of Q or dO as an operand tile, and lse2 or -delta of its rows.
template <class Tile>
__device__ __forceinline__ void bwd_load_rows(const CUtensorMap& map, const float* row_values,
                                              uint32_t tile, uint32_t values, uint32_t bar, int row,
                                              int head, int batch) {
  using Smem = BwdSmem<Tile>;
  ptx::mbarrier_arrive_expect_tx(bar, Smem::kQBytes + Smem::kRowBytes);
#pragma unroll
  for (int p = 0; p < Tile::kPanels; ++p) {
    ptx::tma_load_4d(tile + p * Tile::kBlockQ * 128, &map, bar, p * 64, row, head, batch,
                     ptx::kEvictLast);
  }
  ptx::bulk_load(values, row_values, Smem::kRowBytes, bar);
}

// One thread: Q, dO, lse2 and delta of every step of a task.
template <class Tile>
__device__ __forceinline__ void bwd_load_steps(const BwdArgs& args, const BwdMaps& maps,
                                               const BwdTask<Tile>& task, uint32_t smem,
                                               RingPlace& ring) {
  using Smem = BwdSmem<Tile>;
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const int q_row0 = task.q_row0, batch = task.q_batch, head0 = task.first_q_head();
  const int base = task.row_block_base, tail_q0 = task.first_tail_q0();
  const int draw_at = min_of(task.num_steps(), args.draw_at);
#pragma unroll 1
  for (BwdSteps at(task); at.left > 0; at.next()) {
    const int head = head0 + at.group, q0 = at.q_block * Tile::kBlockQ, stage = ring.slot;
    const int64_t work_row = (head * args.work.row_blocks + base + at.q_block) * Tile::kBlockQ;
    const bool tail = q0 >= tail_q0;
    if (at.left == draw_at) ptx::mbarrier_arrive(bars.near_end());
    ptx::mbarrier_wait(bars.q_empty(stage),
                       ring.phase ^ 1);  // the buffers start empty
    bwd_load_rows<Tile>(maps.q, args.work.lse2 + work_row, smem + Smem::kQ + stage * Smem::kQBytes,
                        smem + Smem::kLse + stage * Smem::kRowBytes,
                        tail ? bars.tail_q(stage) : bars.q_full(stage), q_row0 + q0, head, batch);
    ptx::mbarrier_wait(bars.dout_empty(stage), ring.phase ^ 1);
    bwd_load_rows<Tile>(
        maps.dout, args.work.delta + work_row, smem + Smem::kDout + stage * Smem::kQBytes,
        smem + Smem::kDelta + stage * Smem::kRowBytes,
        tail ? bars.tail_dout(stage) : bars.dout_full(stage), q_row0 + q0, head, batch);
    if constexpr (Tile::kBiasStages > 0)
      bwd_load_bias<Tile>(args, maps, task, smem, ring, head, q0);
    ring.next();
  }
}

// Warp 0 of the first warpgroup, one thread: loads the operands of every task.
template <class Tile, bool kConvert>
__device__ __forceinline__ void bwd_load(const BwdArgs& args, const BwdMaps& maps, uint32_t smem,
                                         uint8_t* smem_ptr) {
  const BwdBarriers<Tile> bars{smem + BwdSmem<Tile>::kBarriers};
  RingPlace rows;
  uint32_t kv_phase = 1;  // K and V start empty
  ptx::griddep_wait();    // lse2 and delta come from the pre-pass
  for (RingPlace tasks;; tasks.next()) {
    ptx::mbarrier_wait(bars.task_full(tasks.slot), tasks.phase);
    const BwdTask<Tile>& task = bwd_task_at<Tile>(smem_ptr, tasks.slot);
    if (task.none) return;
    if (task.num_steps() == 0) {
      ptx::mbarrier_arrive(bars.near_end());
    } else if (kConvert && task.convert) {
      if constexpr (kConvert) bwd_load_sums(args, task, smem, rows);
    } else {
      ptx::mbarrier_wait(bars.kv_empty(), kv_phase);
      bwd_load_kv<Tile>(maps, task, smem);
      kv_phase ^= 1;
      bwd_load_steps<Tile>(args, maps, task, smem, rows);
    }
    ptx::mbarrier_arrive(bars.task_empty(tasks.slot));
  }
}

// Zeroes the rows behind a sequence, which may hold anything, before the consumers look. A warp.
template <class Tile>
struct BwdTails {
  using Smem = BwdSmem<Tile>;
  const uint32_t smem;
  uint8_t* const smem_ptr;
  int stage = 0;
  uint32_t phases = 0;  // a bit a stage of Q and dO, then K and V
  static constexpr uint32_t kKv = 1u << Tile::kStages;

  template <int kRows>
  __device__ void zero(uint32_t loaded, bool phase, int tile, int valid, uint32_t full) const {
    const int lane = threadIdx.x % 32;
    ptx::mbarrier_wait(loaded, phase);
    zero_tail_rows<kRows, Tile::kPanels, 32>(smem_ptr + tile, valid, lane);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(full);
  }

  __device__ void run(const BwdTask<Tile>& task) {
    const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
    const int num_steps = task.num_steps();
    if (num_steps > 0 && task.kv_has_tail()) {
      const int valid = task.mask.seqlen_kv - task.kv0;
      const bool phase = phases & kKv;
      zero<Tile::kBlockKV>(bars.tail_k(), phase, Smem::kK, valid, bars.kv_full());
      zero<Tile::kBlockKV>(bars.tail_v(), phase, Smem::kV, valid, bars.kv_full());
      phases ^= kKv;
    }
    const int tail_q0 = task.first_tail_q0(), seqlen_q = task.mask.seqlen_q;
    if ((task.blocks.end - 1) * Tile::kBlockQ < tail_q0) {
      stage ^= num_steps & 1;
      return;
    }
#pragma unroll 1
    for (BwdSteps at(task); at.left > 0; at.next(), stage ^= 1) {
      const int q0 = at.q_block * Tile::kBlockQ;
      if (q0 < tail_q0) continue;
      const bool phase = phases >> stage & 1;
      zero<Tile::kBlockQ>(bars.tail_q(stage), phase, Smem::kQ + stage * Smem::kQBytes,
                          seqlen_q - q0, bars.q_full(stage));
      zero<Tile::kBlockQ>(bars.tail_dout(stage), phase, Smem::kDout + stage * Smem::kQBytes,
                          seqlen_q - q0, bars.dout_full(stage));
      phases ^= 1u << stage;
    }
  }
};

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

// Warp 3: draws tasks, the next one shortly before the end of one, early enough to load K and V
// without a gap, late enough that no task waits long for a block that is busy; and zeroes sums.
// Tasks are drawn in order also at first, so that whatever a task waits for in deterministic mode
// is running or done, or waits only for such.
template <class Tile, bool kShare>
__device__ __forceinline__ void bwd_draw(const BwdArgs& args, uint32_t smem, uint8_t* smem_ptr) {
  using Smem = BwdSmem<Tile>;
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const int lane = threadIdx.x % 32;
  BwdTails<Tile> tails{smem, smem_ptr};
  for (int i = lane; i < Smem::kZeroBytes / 16; i += 32) {
    reinterpret_cast<uint4*>(smem_ptr + Smem::kZeros)[i] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async_shared();
  __syncwarp();
  ptx::griddep_wait();  // the pre-pass sets the counter
  int index = 0;
  bool second = false;
  for (RingPlace tasks;; tasks.next()) {
    BwdTask<Tile>& task = bwd_task_at<Tile>(smem_ptr, tasks.slot);
    if (lane == 0) {
      ptx::mbarrier_wait(bars.near_end(), tasks.slot ^ 1);
      ptx::mbarrier_wait(bars.task_empty(tasks.slot), tasks.phase ^ 1);
      do {
        if (!second) index = atomicAdd(args.work.next_task, 1);
        task.none = index >= args.num_draws;
        if (task.none) break;
        second = bwd_task<Tile, kShare>(args, index, second, task);
      } while (task.kv0 >= task.kv_slot_end);  // a spare block of a packed batch
      ptx::mbarrier_arrive(bars.task_full(tasks.slot));
      if (!task.none && !task.convert && args.sections_ahead) bwd_zero_sums(args, task, smem);
    }
    __syncwarp();
    if (task.none) return;
    tails.run(task);
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
  const uint32_t smem;
  uint8_t* const smem_ptr;
  const int me;  // 0 or 1
  int turn = 0;  // whose it is
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

  // The rows of both warpgroups, in panels of 64 columns. The copy engine stops at the end of the
  // tensor, but not at the end of a packed sequence; there the warp stores the rows itself.
  __device__ void store_out(const CUtensorMap& map, void* out, Stride stride, int head_dim,
                            const BwdTask<Tile>& task) {
    if (!kOwn && !my_turn()) return;
    wait_full();
    if (out && task.stores[0]) {
      for (int half = 0; half < 2; ++half) {
        if (kOwn && half != me) continue;
        const int first = task.kv0 + half * kRows, rows = task.kv_slot_end - first;
        const int from = Smem::kOut + half * Smem::kOutBytes;
        if (rows >= kRows || !args.params.fwd.cu_seqlens_k) {
          if (leader()) {
#pragma unroll
            for (int p = 0; p < Tile::kPanels; ++p) {
              ptx::tma_store_4d(&map, smem + from + p * kRows * 128, p * 64, task.kv_row0 + first,
                                task.part, task.kv_batch);
            }
            ptx::bulk_commit_group();
          }
        } else {
          char* const to = static_cast<char*>(out) +
                           2 * (task.part * stride.head + (task.kv_row0 + first) * stride.row);
          store_rows(to, stride.row, smem_ptr + from, rows, head_dim / 8);
        }
      }
    }
    hand_back();
  }

  __device__ static void store_rows(char* out, int64_t stride, const uint8_t* from, int rows,
                                    int chunks) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < rows * chunks; i += 32) {
      const int row = i / chunks, chunk = i - row * chunks;
      *reinterpret_cast<uint4*>(out + 2 * row * stride + chunk * 16) =
          *reinterpret_cast<const uint4*>(from + (chunk / 8) * kRows * 128 + row * 128 +
                                          (((chunk % 8) ^ (row & 7)) << 4));
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
        store_out(maps.dv, p.dv, p.dv_stride, p.fwd.head_dim_v, task);
        store_out(maps.dk, p.dk, p.dk_stride, p.fwd.head_dim, task);
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
