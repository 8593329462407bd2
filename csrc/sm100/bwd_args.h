// What a thread block of the backward is told and what it works on.
#pragma once

#include <cuda.h>

#include "common/bwd_workspace.h"
#include "common/mask.h"
#include "common/scheduler.cuh"
#include "common/tma_rows.h"

namespace flash_cuda::sm100 {

struct BwdArgs {
  CUtensorMap q_map, k_map, v_map, dout_map;
  CUtensorMap dk_map, dv_map;  // written, where wanted
  RowMap q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows;
  BwdParams params;
  BwdWorkspace workspace;
  DenseSchedule schedule;
};

// The keys of one KV head that a thread block owns, and the queries that see them.
struct BwdTask {
  SeqInfo seq;
  Mask mask;
  BlockRange blocks;  // of queries
  int kv0;            // first key, in the sequence
  int batch, kv_head, group;
  int tile_base;  // of the sequence's query rows, in the workspace
  bool valid;

  __device__ __forceinline__ int num_steps() const { return (blocks.end - blocks.begin) * group; }

  // How many blocks (or pairs) of kKeys keys add to this dQ before this one: from low to high keys,
  // as the grid starts them.
  template <int kKeys>
  __device__ __forceinline__ int turn(int q_block) const {
    return kv0 / kKeys - mask.kv_blocks(q_block * 128, 128, kKeys).begin;
  }
};

// Of this thread block, or of this one of a pair, which walks the pair's queries; by a whole warp.
template <bool kPair>
__device__ __forceinline__ BwdTask find_task(const BwdArgs& args) {
  constexpr int kKeys = 128, kBlocks = kPair ? 2 : 1, kBlock = kKeys * kBlocks;
  const int index = blockIdx.x / kBlocks, rank = blockIdx.x % kBlocks;
  const FwdParams& p = args.params.fwd;
  WorkTile work;
  if (p.cu_seqlens_k) {
    const int blocks = gridDim.x / kBlocks / p.num_heads_kv;
    const int head = index / blocks;
    work = find_packed_block(p.cu_seqlens_k, p.batch, static_cast<int>(p.total_kv), kBlock,
                             index - head * blocks);
    work.head = head;
  } else {
    work = args.schedule.tile(index);
  }
  BwdTask t{};
  t.valid = work.valid;
  if (!work.valid) return t;
  t.seq = seq_info_or_tail(p, work.batch);
  t.mask = Mask::make(p, t.seq.seqlen_q, t.seq.seqlen_kv);
  t.batch = work.batch;
  t.kv_head = work.head;
  t.group = p.num_heads_q / p.num_heads_kv;
  t.kv0 = work.block * kBlock + rank * kKeys;
  t.tile_base = args.workspace.tile_base(p, t.seq.q_row0, work.batch);
  t.blocks = t.mask.q_blocks(t.kv0, kKeys, 128);
  if (kPair) {
    const BlockRange both = t.mask.q_blocks(work.block * kBlock, kBlock, 128);
    t.blocks.begin = both.begin;
    t.blocks.end = both.end;
  }
  // A ragged tile of keys is masked everywhere.
  if (t.kv0 + kKeys > t.seq.seqlen_kv) t.blocks.full_begin = t.blocks.full_end = t.blocks.begin;
  return t;
}

// The blocks of queries in the order of every role's loop: those of one head after the other, from
// the last one down, so that whoever adds to a dQ earlier is never behind.
struct BwdSteps {
  int first, last, left;
  int q_block, head;
  __device__ __forceinline__ explicit BwdSteps(const BwdTask& t)
      : first(t.blocks.begin),
        last(t.blocks.end - 1),
        left(t.num_steps()),
        q_block(last),
        head(t.kv_head * t.group) {}
  __device__ __forceinline__ void next() {
    --left;
    if (q_block-- == first) {
      q_block = last;
      ++head;
    }
  }
};

}  // namespace flash_cuda::sm100
