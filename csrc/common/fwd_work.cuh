// Which tile of a forward call is which: order of tiles for persistent blocks.
//
// The longest tiles come first. Heads are visited in sections whose K and V stay in the L2 cache
// together. Packed sequences are counted on the device, where their lengths are.
#pragma once

#include "common/host_device.h"
#include "common/params.h"
#include "common/seqlen.h"

namespace flash_cuda {

// K and V of a section of heads: well inside the L2 cache.
constexpr double kSectionBytes = 32e6;

// One unit of work, as the scheduler warp hands it to the others (32 bytes of shared memory).
struct alignas(16) FwdWork {
  int q_block, head, batch;  // q_block < 0: no more work
  int q_row0;                // of SeqInfo, and so on
  int seqlen_q, seqlen_q_slot, seqlen_kv, kv_row0;

  FLASH_CUDA_HOST_DEVICE static FwdWork none() { return {-1, 0, 0, 0, 0, 0, 0, 0}; }
};

// Tile `index` of `pairs` (batch, head) pairs with `q_blocks` tiles each: sections of pairs, inside
// one the Q blocks from the last (which sees most keys under a causal mask) to the first, pairs
// fastest. From pair `joined_from` on, sections are one. The first `held_back` Q blocks, which see
// few keys under a causal mask, come behind all sections.
struct TilePlace {
  int q_block, pair;
  FLASH_CUDA_HOST_DEVICE static TilePlace find(int index, int pairs, int q_blocks, int section,
                                               int joined_from = kUnbounded, int held_back = 0) {
    const int walked = q_blocks - held_back;
    if (index >= walked * pairs) {
      const int left = index - walked * pairs;
      return {held_back - 1 - left / pairs, left % pairs};
    }
    const int first = min_of(index / (section * walked) * section, joined_from);
    const int rest = index - first * walked;
    const int width = first == joined_from ? pairs - first : min_of(section, pairs - first);
    const int block = rest / width;
    return {q_blocks - 1 - block, first + rest - block * width};
  }
};

// (batch, head) pairs whose K and V together stay well inside the L2 cache, whole groups.
inline int heads_section(const FwdParams& p) {
  const double kv_head = double(p.seqlen_kv) * (p.head_dim + p.head_dim_v) * 2;
  const int kv_pairs = p.batch * p.num_heads_kv;
  int section = 1;
  while (section * 2 * kv_head <= kSectionBytes && section < kv_pairs) section *= 2;
  return min_of(section, kv_pairs) * (p.num_heads_q / p.num_heads_kv);
}

FLASH_CUDA_HOST_DEVICE FwdWork make_work(const SeqInfo& info, int batch, int head, int q_block) {
  return {q_block,        head,        batch, info.q_row0, info.seqlen_q, info.seqlen_q_slot,
          info.seqlen_kv, info.kv_row0};
}

// Tile `index` where every sequence has a slot of the same length.
FLASH_CUDA_HOST_DEVICE FwdWork dense_work(const FwdParams& p, int q_blocks, int section, int index,
                                          int joined_from = kUnbounded, int held_back = 0) {
  const TilePlace place =
      TilePlace::find(index, p.batch * p.num_heads_q, q_blocks, section, joined_from, held_back);
  const int batch = place.pair / p.num_heads_q;
  return make_work(seq_info(p, batch), batch, place.pair - batch * p.num_heads_q, place.q_block);
}

#if defined(__CUDACC__)
// Tiles of packed sequences, one sequence after the other. The warp counts them itself, a sequence
// a lane. The rows behind the last sequence are one more sequence, without keys.
struct PackedTiles {
  const FwdParams& p;
  const int block_q, lane;
  int group = 0;  // first of the 32 sequences in the lanes
  int tiles = 0;  // of this lane's sequence
  int upto = 0;   // of all sequences up to this lane's

  __device__ __forceinline__ SeqInfo info(int batch) const {
    if (batch < p.batch) return seq_info(p, batch);
    SeqInfo rest{};
    rest.q_row0 = p.cu_seqlens_q[p.batch];
    rest.seqlen_q_slot = max_of(static_cast<int>(p.total_q) - rest.q_row0, 0);
    return rest;
  }
  // `before`: tiles of the sequences before the group.
  __device__ __forceinline__ void load_group(int before) {
    const int batch = group + lane;
    tiles = batch > p.batch ? 0 : ceil_div(info(batch).seqlen_q_slot, block_q) * p.num_heads_q;
    upto = tiles;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    upto += before;
  }
  __device__ __forceinline__ int group_end() const { return __shfl_sync(~0u, upto, 31); }

  // All tiles; stands at the first group afterwards.
  __device__ __forceinline__ int count() {
    int sum = 0;
    for (group = p.batch / 32 * 32;; group -= 32) {
      load_group(0);
      sum += group_end();
      if (group == 0) return sum;
    }
  }

  // Tile `index`; indices never fall, and are below count().
  __device__ __forceinline__ FwdWork find(int index) {
    for (int end = group_end(); index >= end; end = group_end()) {
      group += 32;
      load_group(end);
    }
    const int source = __popc(__ballot_sync(~0u, index >= upto));
    const int first = __shfl_sync(~0u, upto - tiles, source);
    const SeqInfo seq = info(group + source);
    const TilePlace place = TilePlace::find(
        index - first, p.num_heads_q, ceil_div(seq.seqlen_q_slot, block_q), section(seq.seqlen_kv));
    return make_work(seq, min_of(group + source, p.batch - 1), place.pair, place.q_block);
  }

  // Heads whose K and V stay in the L2 cache, as heads_section has it.
  __device__ __forceinline__ int section(int seqlen_kv) const {
    const float bytes = 2.0f * float(max_of(seqlen_kv, 1)) * float(p.head_dim + p.head_dim_v);
    const int heads =
        min_of(static_cast<int>(__fdividef(float(kSectionBytes), bytes)), p.num_heads_kv);
    return max_of(heads, 1) * (p.num_heads_q / p.num_heads_kv);
  }
};
#endif

}  // namespace flash_cuda
