// Which (sequence, head, block of rows) a thread block works on.
//
// Grids are linear, so that neither heads nor batch meet the limit of 65,535. Dense problems go
// through the heads in sections whose keys and values fit L2 together, longest blocks first.
// Packed problems find their sequence from cu_seqlens on the device: the host knows no lengths.
#pragma once

#include "common/host_device.h"
#include "common/params.h"
#include "common/seqlen.h"

namespace flash_cuda {

struct WorkTile {
  int batch;  // == params.batch: rows of a packed tensor past the last sequence
  int head;
  int block;  // index of the block of rows inside its sequence
  bool valid;
};

struct DenseSchedule {
  int blocks;  // blocks of rows in a sequence
  int heads;   // heads a sequence
  int batch;
  int section;      // (batch, head) pairs walked together
  bool descending;  // last block of rows first: the longest one under a causal mask

  FLASH_CUDA_HOST_DEVICE int64_t size() const {
    return static_cast<int64_t>(blocks) * heads * batch;
  }
  FLASH_CUDA_HOST_DEVICE WorkTile tile(int index) const {
    const int pairs = heads * batch;
    const int per_section = section * blocks;
    const int s = index / per_section, in_section = index - s * per_section;
    const int width = min_of(section, pairs - s * section);
    const int rank = in_section / width;
    const int pair = s * section + in_section - rank * width;
    const int b = pair / heads;
    return {b, pair - b * heads, descending ? blocks - 1 - rank : rank, true};
  }
};

// Number of blocks that cover the packed rows, and a place for each: block i of sequence b is
// stored at packed_block_base(...) + i. Places of different sequences never meet.
FLASH_CUDA_HOST_DEVICE int64_t packed_blocks(int64_t total_rows, int batch, int block_rows) {
  return total_rows / block_rows + batch + 1;
}
FLASH_CUDA_HOST_DEVICE int packed_block_base(int row0, int sequence, int block_rows) {
  return row0 / block_rows + sequence;
}

#if defined(__CUDACC__)
// Finds the sequence whose blocks contain place `index`, by the warp. cu_seqlens has batch + 1
// entries; the rows from there to total_rows form one more sequence, number `batch`. A row counts
// as `multiple` rows.
__device__ __forceinline__ WorkTile find_packed_block(const int* cu_seqlens, int batch,
                                                      int total_rows, int block_rows, int index,
                                                      int multiple = 1) {
  const int lane = threadIdx.x % 32;
  int found = -1;
  for (int first = 0; first <= batch && found < 0; first += 32) {
    const int b = first + lane;
    bool mine = false;
    if (b <= batch) {
      const int row0 = cu_seqlens[b] * multiple;
      const int row1 = (b < batch ? cu_seqlens[b + 1] : total_rows) * multiple;
      const int base = packed_block_base(row0, b, block_rows);
      mine = index >= base && index < base + ceil_div(max_of(row1 - row0, 0), block_rows);
    }
    const unsigned ballot = __ballot_sync(0xffffffffu, mine);
    if (ballot != 0) found = first + __ffs(ballot) - 1;
  }
  if (found < 0) return {0, 0, 0, false};
  const int base = packed_block_base(cu_seqlens[found] * multiple, found, block_rows);
  return {found, 0, index - base, true};
}

// seq_info, also for the pseudo-sequence behind the last one (no row and no key counts there).
__device__ __forceinline__ SeqInfo seq_info_or_tail(const FwdParams& p, int b) {
  if (b < p.batch) return seq_info(p, b);
  SeqInfo s{};
  if (p.cu_seqlens_q) {
    s.q_row0 = p.cu_seqlens_q[b];
    s.seqlen_q_slot = static_cast<int>(p.total_q) - s.q_row0;
  }
  if (p.cu_seqlens_k) {
    s.kv_row0 = p.cu_seqlens_k[b];
    s.seqlen_kv_slot = static_cast<int>(p.total_kv) - s.kv_row0;
  }
  return s;
}
#endif

}  // namespace flash_cuda
