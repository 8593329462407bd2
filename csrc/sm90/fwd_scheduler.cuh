// Which tile a block computes next.
//
// Blocks are persistent and draw tiles from a counter in global memory, the longest first. Heads
// are visited in sections whose K and V stay in the L2 cache together. The counter returns to zero
// with the last draw, so the next launch finds it ready.
#pragma once

#include "common/host_device.h"
#include "sm90/fwd_args.h"

namespace flash_cuda::sm90 {

// Tile `index` of a dense problem: sections of (batch, head) pairs, inside one the Q blocks from
// the last (which sees most keys under a causal mask) to the first, heads fastest.
FLASH_CUDA_HOST_DEVICE FwdWork dense_work(const FwdParams& p, const FwdSchedule& s, int index) {
  const int pairs = p.batch * p.num_heads_q;
  const int section_tiles = s.section * s.q_blocks;
  const int section = index / section_tiles;
  const int rest = index - section * section_tiles;
  const int width = min_of(s.section, pairs - section * s.section);
  const int block = rest / width;
  const int pair = section * s.section + rest - block * width;
  FwdWork w;
  w.q_block = s.q_blocks - 1 - block;
  w.batch = pair / p.num_heads_q;
  w.head = pair - w.batch * p.num_heads_q;
  const SeqInfo info = seq_info(p, w.batch);
  w.q_row0 = info.q_row0;
  w.seqlen_q = info.seqlen_q;
  w.seqlen_q_slot = info.seqlen_q_slot;
  w.seqlen_kv = info.seqlen_kv;
  w.kv_row0 = info.kv_row0;
  return w;
}

}  // namespace flash_cuda::sm90
