// What a pair of the backward for head dims up to 256 is told and what it works on.
#pragma once

#include <cuda.h>

#include "common/bwd_workspace.h"
#include "common/mask.h"
#include "common/scheduler.cuh"
#include "common/tma_rows.h"

namespace flash_cuda::sm100 {

// A tensor of rows that the copy engine reads or writes.
struct WideTensor {
  CUtensorMap map;
  RowMap rows;
};

// Keys stay: K, V; Q, dO; dK, dV. Queries stay: Q, dO; K, V; dQ.
struct BwdWideArgs {
  WideTensor stay[2], pass[2], grad[2];
  BwdParams params;
  BwdWorkspace workspace;
  DenseSchedule schedule;  // of the side that stays
};

struct BwdWideTask {
  SeqInfo seq;
  Mask mask;
  BlockRange blocks;  // of the side that passes
  int row0;           // the pair's first row, in the sequence
  int batch, head;    // of the side that stays
  int pass_head, pass_heads;
  int tile_base;  // of the sequence's query rows, in the workspace
  bool valid;

  __device__ __forceinline__ int num_steps() const {
    return (blocks.end - blocks.begin) * pass_heads;
  }
};

// Of this pair; by a whole warp.
template <class Tile>
__device__ __forceinline__ BwdWideTask find_wide_task(const BwdWideArgs& args) {
  constexpr int kBlock = Tile::kBlock;
  const FwdParams& p = args.params.fwd;
  const int* cu_seqlens = Tile::kKeysStay ? p.cu_seqlens_k : p.cu_seqlens_q;
  const int heads = Tile::kKeysStay ? p.num_heads_kv : p.num_heads_q;
  const int index = blockIdx.x / 2, group = p.num_heads_q / p.num_heads_kv;
  WorkTile work;
  if (cu_seqlens) {
    const int blocks = gridDim.x / 2 / heads;
    const int head = index / blocks;
    const int64_t total = Tile::kKeysStay ? p.total_kv : p.total_q;
    work = find_packed_block(cu_seqlens, p.batch, static_cast<int>(total), kBlock,
                             index - head * blocks);
    work.head = head;
  } else {
    work = args.schedule.tile(index);
  }
  BwdWideTask t{};
  t.valid = work.valid;
  if (!work.valid) return t;
  t.seq = seq_info_or_tail(p, work.batch);
  t.mask = Mask::make(p, t.seq.seqlen_q, t.seq.seqlen_kv);
  t.batch = work.batch;
  t.head = work.head;
  t.row0 = work.block * kBlock;
  t.tile_base = args.workspace.tile_base(p, t.seq.q_row0, work.batch);
  if (Tile::kKeysStay) {
    t.pass_head = work.head * group;
    t.pass_heads = group;
    t.blocks = t.mask.q_blocks(t.row0, kBlock, kBlock);
    // A ragged tile of keys is masked everywhere.
    if (t.row0 + kBlock > t.seq.seqlen_kv) {
      t.blocks.full_begin = t.blocks.full_end = t.blocks.begin;
    }
  } else {
    t.pass_head = work.head / group;
    t.pass_heads = 1;
    t.blocks = t.mask.kv_blocks(t.row0, kBlock, kBlock);
  }
  return t;
}

// What passes, in the order of every role's loop.
struct BwdWideSteps {
  int first, last, left;
  int block, head;
  __device__ __forceinline__ explicit BwdWideSteps(const BwdWideTask& t)
      : first(t.blocks.begin),
        last(t.blocks.end - 1),
        left(t.num_steps()),
        block(last),
        head(t.pass_head) {}
  __device__ __forceinline__ void next() {
    --left;
    if (block-- == first) {
      block = last;
      ++head;
    }
  }
};

}  // namespace flash_cuda::sm100
