// What a thread block of the backward has to do, and how its threads find each other.
#pragma once

#include <cuda.h>

#include "common/mask.h"
#include "common/seqlen.h"
#include "common/tma_rows.h"
#include "ptx/fence.h"
#include "ptx/mbarrier.h"
#include "ptx/red.h"
#include "sm90/bwd_tile.h"

namespace flash_cuda::sm90 {

struct BwdMaps {
  CUtensorMap q, k, v, dout;
  CUtensorMap dk, dv;  // written
  CUtensorMap bias, dbias;
};

// How the maps of q and dout, k and v, dk and dv find the rows of a sequence.
struct BwdRowMaps {
  RowMap q, dout, k, v, dk, dv;
};

// How the bias is read and its gradient written where there is room for a tile of it: in tiles by
// the copy engine, or as a value a key where all queries share one row.
enum class BiasAccess : int { kNone, kTiles, kKeys };

// A last round of equal tasks that would leave thread blocks idle: the tasks, of `steps` Q blocks
// each, lie end to end and are cut into shares of `length`, one for a thread block. So a share is a
// piece of a task, or the end of one and the beginning of the next. In deterministic mode `steps`
// is a multiple of `length`, the last of them empty, so that no share belongs to two tasks. The
// pieces of a task leave dK and dV in the workspace, and the thread block that is done last adds
// them.
struct BwdShares {
  int tasks, steps, length;
  int count;       // 0: no task is shared
  int all_pieces;  // of all tasks

  __device__ int first_task(int share) const { return share * length / steps; }
  FLASH_CUDA_HOST_DEVICE int first_share(int task) const { return task * steps / length; }
  FLASH_CUDA_HOST_DEVICE int pieces_of(int task) const {
    return ((task + 1) * steps - 1) / length - first_share(task) + 1;
  }
  // Where a piece leaves its gradients; those of a task follow each other.
  FLASH_CUDA_HOST_DEVICE int slots() const { return count + tasks; }
  __device__ static int slot(int share, int task) { return share + task; }
};

// The kernel's arguments beside the tensor maps.
struct BwdArgs {
  BwdParams params;
  BwdWorkspace work;
  float masked_score;  // becomes -inf by softmax_scale
  // A logit in log2 units: score * scale_log2, where the score is q.k; in the general variant it is
  // q.k * to_score, then tanh of it (softcap) or less the distance by slope (ALiBi).
  float scale_log2, to_score;
  int kv_blocks;          // of one KV head, over the whole batch
  int splits;             // a KV head's query heads are dealt out to so many tasks ("parts")
  int parts;              // num_heads_kv * splits
  int heads_per_section;  // (batch *) parts whose Q and dO share the L2 cache
  int sections_of;        // what is divided into sections: batch * parts, packed: parts
  int num_sections;
  // Of the last section, at most: as many as of the others, and joined_heads more.
  int last_heads, joined_heads;
  int num_tasks;  // kv_blocks * sections_of; with spare ones in a packed batch
  // A dense call of many sections zeroes most of its dQ sums in the main kernel, shortly before
  // they are added to (wait_zeroed); the pre-pass zeroes those of the first sections. Else 0.
  int sections_ahead;
  // Conversions of a section (bwd_convert.cuh), drawn like tasks that many sections behind its own.
  // 0: the post-pass does it.
  int conversions;
  int last_conversions;  // those of the last section
  BwdShares shares;      // of the last tasks, all of them of the last section
  int num_draws;         // tasks that are not shared, shares and conversions
  int counter;           // that tells what is drawn, see tile_counter.h
  int q_blocks;          // row blocks of a query head
  int draw_at;  // a task is drawn when so many steps of the one before are still to be loaded
  // Deterministic mode, a bias with one row for all queries: from the dbias of a row block to the
  // next one's. Else 0.
  int64_t dbias_block_stride;
  BiasAccess bias_read, bias_write;
  // Sections from this one on begin with low keys and walk their Q blocks downwards, those before
  // it begin with high keys and walk upwards.
  int first_down;
  bool
      batch_inner;  // the order of (batch, part) pairs: all batches of a head, which share its bias

  __device__ int tasks_per_section() const { return heads_per_section * kv_blocks; }
  FLASH_CUDA_HOST_DEVICE int heads_of_section(int section) const {
    const int rest = sections_of - section * heads_per_section;
    return rest <= last_heads ? rest : heads_per_section;
  }
  __device__ int tasks_of_section(int section) const {
    return heads_of_section(section) * kv_blocks;
  }
  // With tasks that are shared: what is drawn of a section, and how many pieces that is.
  __device__ int draws_of_section(int section) const {
    const int more = section < num_sections - 1 ? 0 : shares.count - shares.tasks;
    return tasks_of_section(section) + more;
  }
  __device__ int pieces_of_section(int section) const {
    const int more = section < num_sections - 1 ? 0 : shares.all_pieces - shares.tasks;
    return tasks_of_section(section) + more;
  }
  // Row blocks in the order of the sections: those of a query head, then of the next.
  __device__ int items_per_head() const { return params.fwd.num_heads_q / parts * q_blocks; }
  __device__ int first_item_of_section(int section) const {
    const int heads = section * heads_per_section;
    return (sections_of - heads > joined_heads ? heads : sections_of) * items_per_head();
  }
  // The (batch, part) of a number in the order of the sections.
  __device__ void pair(int number, int& b, int& part) const {
    const int inner = batch_inner ? params.fwd.batch : parts;
    const int outer = number / inner, rest = number - outer * inner;
    b = batch_inner ? rest : outer;
    part = batch_inner ? outer : rest;
  }
  // The first row block of a query head in that order.
  __device__ int item_of(int b, int head) const {
    const int group = params.fwd.num_heads_q / parts, part = head / group;
    return ((batch_inner ? part * params.fwd.batch + b : b * parts + part) * group + head -
            part * group) *
           q_blocks;
  }
  // Where a row block lies among those of its head.
  __device__ int64_t row_block_number(int item) const {
    const int group = params.fwd.num_heads_q / parts;
    const int line = item / q_blocks, number = line / group;
    int b, part;
    pair(number, b, part);
    return (part * group + line - number * group) * work.row_blocks + b * q_blocks + item -
           line * q_blocks;
  }
};

constexpr int kConvertBlocks = 8;      // row blocks of a conversion
constexpr int kLastConvertBlocks = 2;  // in the last section, when nothing else is left to do

template <class Tile>
struct BwdBarriers {
  uint32_t base;  // shared-memory address
  __device__ uint32_t k_full(int buffer) const { return base + 8 * buffer; }
  __device__ uint32_t v_full() const { return base + 16; }
  __device__ uint32_t q_full(int stage) const { return base + 8 * (3 + stage); }
  __device__ uint32_t q_empty(int stage) const { return q_full(stage) + 8 * Tile::kStages; }
  __device__ uint32_t dout_full(int stage) const { return q_full(stage) + 16 * Tile::kStages; }
  __device__ uint32_t dout_empty(int stage) const { return q_full(stage) + 24 * Tile::kStages; }
  __device__ uint32_t k_empty(int buffer) const { return q_full(Tile::kStages * 4 + buffer); }
  // dV lies in a buffer of K.
  __device__ uint32_t dv_full(int buffer) const { return k_empty(0) + 8 * (2 + buffer); }
  __device__ uint32_t task_full(int slot) const { return k_empty(0) + 8 * (4 + slot); }
  __device__ uint32_t task_empty(int slot) const { return task_full(slot) + 16; }
  __device__ uint32_t near_end() const { return task_empty(0) + 16; }  // time to draw a task
  __device__ uint32_t bias_full(int stage) const { return near_end() + 8 * (1 + stage); }
  __device__ uint32_t bias_empty(int stage) const {
    return bias_full(stage) + 8 * Tile::kBiasStages;
  }
  static constexpr int kCount = 12 + 4 * Tile::kStages + 2 * Tile::kBiasStages;
  // Every thread that reads something counts itself when it is done with it: the race checker of
  // compute-sanitizer would not see that one thread of a warp speaks for the others. A stage is
  // let go of in every step, where so many arrivals cost 1 %: there a lane counts for its warp, if
  // all threads have met at a barrier (kDsReady) since they read lse and delta.
  static constexpr int kReaders = 128 * Tile::kConsumerWarpgroups;
  static constexpr bool kWarpsLeave = !Tile::kDqInTurns;
  static constexpr int kStageReaders = kWarpsLeave ? kReaders / 32 : kReaders;
  static constexpr int kTaskReaders = 1 + 64 + kReaders;  // the loader and the store warps, too
  // `staged_dbias`: the thread that hands the gradient of a bias on hands its tile back.
  __device__ void init(bool staged_dbias) const {
    for (int s = 0; s < 2; ++s) {
      ptx::mbarrier_init(k_full(s), 1);
      ptx::mbarrier_init(k_empty(s), Tile::kDvInK ? 32 : kReaders);  // a store warp
      ptx::mbarrier_init(dv_full(s), kReaders);
    }
    ptx::mbarrier_init(v_full(), 1);
    ptx::mbarrier_init(near_end(), 1);
    for (int s = 0; s < 2; ++s) {
      ptx::mbarrier_init(task_full(s), 1);
      ptx::mbarrier_init(task_empty(s), kTaskReaders);
    }
    for (int s = 0; s < Tile::kStages; ++s) {
      ptx::mbarrier_init(q_full(s), 1);
      ptx::mbarrier_init(dout_full(s), 1);
      ptx::mbarrier_init(q_empty(s), kStageReaders);
      ptx::mbarrier_init(dout_empty(s), kStageReaders);
    }
    for (int s = 0; s < Tile::kBiasStages; ++s) {
      ptx::mbarrier_init(bias_full(s), 1);
      ptx::mbarrier_init(bias_empty(s), staged_dbias ? Tile::kConsumerWarpgroups : kReaders);
    }
  }
};

// A place in a ring of two and the phase of its barriers.
struct RingPlace {
  int slot = 0;
  uint32_t phase = 0;
  __device__ void next() {
    slot ^= 1;
    phase ^= slot == 0;
  }
};

// A place among the buffers of K and the phase of their barriers, in two bits.
template <class Tile>
struct KeyPlace {
  uint32_t at = 0;
  __device__ int slot() const { return at & 1; }
  __device__ uint32_t phase() const { return at >> 1 & 1; }
  __device__ void next() { at += Tile::kKBuffers == 2 ? 1 : 2; }
};

template <class Tile>
struct alignas(Tile::kHeadDim > 128 ? 4 : 16) BwdTask {
  // Wide heads lack the registers for both directions and for parts.
  static constexpr bool kNarrow = Tile::kHeadDim <= 128;
  Mask mask;
  BlockRange blocks;  // Q blocks to visit
  int kv0;            // first key of the block, in the sequence
  int kv_row0, kv_batch, kv_head;
  int part;         // of all heads: where dK and dV go
  int kv_slot_end;  // keys whose gradient is to be written
  int q_row0, q_batch, sequence;
  int section, in_section;  // of heads, and the task's place in it
  int row_block_base;       // of the sequence, in the workspace
  int group_size;           // query heads of the part
  bool down;                // from the last Q block to the first
  bool none;                // no task is left
  bool convert;             // sums of dQ, the row blocks `blocks` of `section`
  // dK and dV, those of each group of threads that joins pieces for itself: unless it is a piece of
  // a shared task, and not the last one done.
  bool stores[2];
  int pieces, shared, slot;  // of how many pieces it is one; of which shared task; its place

  __device__ int num_steps() const { return group_size * (blocks.end - blocks.begin); }
  __device__ int first_q_head() const { return (kNarrow ? part : kv_head) * group_size; }
  // Deterministic mode: how many KV blocks add to this block of dQ before this one. They go from
  // high keys to low. Tasks are drawn in that order, so that whatever one waits for is running or
  // done; and since a task starts at its first Q block, under a causal mask those begun together
  // never meet.
  __device__ int turn(int q_block) const {
    if (down) return kv0 / Tile::kBlockKV;
    const int last_q = min_of((q_block + 1) * Tile::kBlockQ, mask.seqlen_q) - 1;
    return (mask.kv_end(last_q) - 1) / Tile::kBlockKV - kv0 / Tile::kBlockKV;
  }
};

// The Q blocks of a task in the order of its loop: those of one head after the other. Downwards all
// KV blocks of a causal head begin with the same one, which is read once; upwards they begin at
// their diagonals, so that deterministic mode need not wait.
template <class Tile>
struct BwdSteps {
  int begin, end, left;    // from the first block to behind the last one
  int q_block, group = 0;  // and the place of the head in the group
  __device__ explicit BwdSteps(const BwdTask<Tile>& task)
      : begin(task.blocks.begin), end(task.blocks.end), left(task.num_steps()) {
    if (task.down) {
      begin = task.blocks.end - 1;
      end = task.blocks.begin - 1;
    }
    q_block = begin;
  }
  __device__ void next() {
    --left;
    q_block += begin > end ? -1 : 1;
    if (q_block == end) {
      q_block = begin;
      ++group;
    }
  }
};

// The last i < count for which value_of(i), which does not fall, is not beyond `index`.
template <class Value>
__device__ __forceinline__ int last_at_most(int count, int64_t index, const Value& value_of) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int mid = (low + high + 1) / 2;
    if (value_of(mid) <= index) {
      low = mid;
    } else {
      high = mid - 1;
    }
  }
  return low;
}

// Which sequence of a packed batch a block belongs to, where sequence b starts at block
// cu_seqlens[b] / block + b.
__device__ __forceinline__ int sequence_of_block(const int* cu_seqlens, int batch, int64_t index,
                                                 int block) {
  return last_at_most(batch, index, [&](int b) { return cu_seqlens[b] / block + b; });
}

// The sequence of a KV block of a packed batch, in the order in which blocks are drawn, and the
// block's place in it; behind its end if it is a spare one. `falling`: from high keys to low.
template <class Tile>
__device__ __forceinline__ int packed_kv_block(const BwdArgs& args, int& kv_block, bool falling) {
  const FwdParams& p = args.params.fwd;
  const BwdWorkspace& work = args.work;
  if (BwdTask<Tile>::kNarrow && work.sequences) {
    const int rank = last_at_most(p.batch, kv_block, [&](int r) { return work.first_blocks[r]; });
    kv_block -= work.first_blocks[rank];
    const int last = work.first_blocks[rank + 1] - work.first_blocks[rank] - 1;
    if (falling && kv_block <= last) kv_block = last - kv_block;
    return work.sequences[rank];
  }
  if (falling) kv_block = args.kv_blocks - 1 - kv_block;
  const int b = sequence_of_block(p.cu_seqlens_k, p.batch, kv_block, Tile::kBlockKV);
  kv_block -= p.cu_seqlens_k[b] / Tile::kBlockKV + b;
  return b;
}

// What is drawn as `index`: true, and `t` is a conversion, or the number of a task. Conversions of
// a section come when all thread blocks have drawn another task since its own.
template <class Tile>
__device__ __forceinline__ bool bwd_conversion(const BwdArgs& args, int& index, BwdTask<Tile>& t) {
  const int ahead = args.sections_ahead, per_section = args.tasks_per_section();
  int i = index - ahead * per_section;
  if (i < 0) return false;
  // Section by section: tasks of one and conversions of one before it; at last only conversions.
  const int period = per_section + args.conversions;
  int section = min_of(i / period, args.num_sections - 1 - ahead);
  i -= section * period;
  const int tasks = args.draws_of_section(section + ahead);
  if (i < tasks) {
    index = (section + ahead) * per_section + i;
    return false;
  }
  i -= tasks;
  const int further = min_of(i / args.conversions, args.num_sections - 1 - section);
  section += further;
  i -= further * args.conversions;
  const int items = args.first_item_of_section(section + 1) - args.first_item_of_section(section);
  t.section = section;
  const int blocks = section == args.num_sections - 1 ? kLastConvertBlocks : kConvertBlocks;
  t.blocks.begin = min_of(i * blocks, items);
  t.blocks.end = min_of(t.blocks.begin + blocks, items);
  t.group_size = 1;
  t.kv0 = 0;
  t.kv_slot_end = 1;
  t.down = t.none = false;
  t.convert = true;
  return true;
}

// Makes of a task the piece of it that lies in a share. True: the share has a `second` piece.
template <class Tile>
__device__ __forceinline__ bool bwd_piece(const BwdShares& shares, int share, bool second,
                                          BwdTask<Tile>& t) {
  const int task = shares.first_task(share) + second;
  const int from = share * shares.length - task * shares.steps;
  const int to = min_of(from + shares.length, (shares.tasks - task) * shares.steps);
  t.blocks.begin = max_of(from, 0);
  t.blocks.end = min_of(to, t.blocks.end);
  t.pieces = shares.pieces_of(task);
  t.stores[0] = t.stores[1] = t.pieces == 1;
  t.shared = task;
  t.slot = BwdShares::slot(share, task);
  return to > shares.steps;
}

// Registers are short in the general variant.
template <class Tile, bool kGeneral>
constexpr bool kShares = Tile::kBiasStages == 0 && !kGeneral;

// What is drawn as `index`. True: it is a share with a `second` piece, which is to be asked for
// next.
template <class Tile, bool kShare>
__device__ __forceinline__ bool bwd_task(const BwdArgs& args, int index, bool second,
                                         BwdTask<Tile>& t) {
  const FwdParams& p = args.params.fwd;
  if constexpr (BwdTask<Tile>::kNarrow) {
    if (args.conversions && bwd_conversion(args, index, t)) return false;
    t.convert = false;
  }
  t.stores[0] = t.stores[1] = true;
  t.pieces = 1;
  const int share = kShare && args.shares.count ? index - (args.num_tasks - args.shares.tasks) : -1;
  if (share >= 0) index += args.shares.first_task(share) + second - share;
  // Sections of heads; inside one, KV blocks outer and heads inner, low keys first (the longest
  // rows under a causal mask).
  const int per_section = args.tasks_per_section();
  int section = index / per_section;
  if (BwdTask<Tile>::kNarrow) section = min_of(section, args.num_sections - 1);
  const int rest = index - section * per_section;
  const int heads = args.heads_of_section(section);
  int kv_block = rest / heads;
  const int bh = section * args.heads_per_section + rest - kv_block * heads;

  constexpr bool kNarrow = BwdTask<Tile>::kNarrow;
  t.down = section >= args.first_down;
  const bool falling = args.params.deterministic && !t.down;

  int b, part;
  if (p.cu_seqlens_k) {
    part = bh;
    b = packed_kv_block<Tile>(args, kv_block, falling);
  } else {
    if (falling) kv_block = args.kv_blocks - 1 - kv_block;
    if constexpr (Tile::kBiasStages > 0) {
      args.pair(bh, b, part);
    } else {
      b = bh / args.parts;
      part = bh - b * args.parts;
    }
  }
  const SeqInfo s = seq_info(p, b);
  t.mask = Mask::make(p, s.seqlen_q, s.seqlen_kv);
  t.kv0 = kv_block * Tile::kBlockKV;
  t.blocks = t.mask.q_blocks(t.kv0, Tile::kBlockKV, Tile::kBlockQ);
  // A ragged block of keys is masked everywhere.
  if (t.kv0 + Tile::kBlockKV > s.seqlen_kv) t.blocks.full_begin = t.blocks.full_end = 0;
  t.kv_row0 = s.kv_row0;
  t.kv_batch = s.kv_batch;
  t.kv_slot_end = s.seqlen_kv_slot;
  t.q_row0 = s.q_row0;
  t.q_batch = s.q_batch;
  t.sequence = b;
  t.section = section;
  t.in_section = rest;
  t.row_block_base = static_cast<int>(row_block_base(p, b, Tile::kBlockQ));
  t.kv_head = kNarrow ? part / args.splits : part;
  if (kNarrow) t.part = part;
  t.group_size = p.num_heads_q / args.parts;
  t.none = false;
  if constexpr (kShare) {
    if (share >= 0) return bwd_piece(args.shares, share, second, t);
  }
  return false;
}

__device__ __forceinline__ void wait_for_turn(const int* turn, int mine) {
  while (ptx::load_acquire(turn) != mine) {
  }
  ptx::fence_proxy_async_global();  // the copy engine adds after what the others' added
}
// Once what the engine added has arrived (bulk_wait_group): this thread sees it then, and so does
// who acquires the turn.
__device__ __forceinline__ void pass_turn(int* turn, int mine) {
  ptx::store_release(turn, mine + 1);
}

// Returns once a counter has come to `all`; what was done before it can then be read, and added to,
// by the copy engine.
__device__ __forceinline__ void wait_counted(const int* counter, int all) {
  while (ptx::load_acquire(counter) != all) {
  }
  ptx::fence_proxy_async_global();
}
// Until the sums of the section are zeroed, by so many blocks a task.
__device__ __forceinline__ void wait_zeroed(const BwdArgs& args, int section, int blocks = 1) {
  if (!args.sections_ahead || section < args.sections_ahead) return;  // by the pre-pass
  wait_counted(args.work.zeroed + section,
               blocks * args.tasks_of_section(section - args.sections_ahead));
}
// Until all is added to them, by two store warps a task, or piece of one.
__device__ __forceinline__ void wait_added(const BwdArgs& args, int section) {
  wait_counted(args.work.added + section, 2 * args.pieces_of_section(section));
}

// A task's part of the row blocks, in the order of the sections, whose sums it zeroes.
struct ItemRange {
  int begin, end;
};
template <class Tile>
__device__ __forceinline__ ItemRange items_to_zero(const BwdArgs& args, const BwdTask<Tile>& task) {
  const int section = task.section + args.sections_ahead;
  const int first = args.first_item_of_section(section);
  const int all = args.first_item_of_section(section + 1) - first;
  const int tasks = args.tasks_of_section(task.section), each = all / tasks, rest = all % tasks;
  const int begin = first + task.in_section * each + min_of(task.in_section, rest);
  return {begin, begin + each + (task.in_section < rest)};
}

}  // namespace flash_cuda::sm90
