// What the launcher adds to FwdParams: tensor maps and the order of tiles.
#pragma once

#include <cuda.h>

#include "common/mask.h"
#include "common/params.h"
#include "common/seqlen.h"

namespace flash_cuda::sm90 {

// Two coordinates of a tensor map beside the column and the row.
struct MapRows {
  int row0, c2, c3;  // row r of the sequence is (column, row0 + r, c2, c3)
};

// How the rows of a sequence are found in a map, so that the copy engine stops at its last row.
//
// Dense: (column, row, head, batch), and the tensor ends where the sequence does. Clipped: two
// dimensions run over the rows, (column, row1, row2, head), both with the row stride; the base lies
// `extent` rows ahead. A sequence of `len` rows from `first` on uses row1 = extent - len + r,
// row2 = first + len: rows past the end leave the bounds of row1 and read as zero.
struct RowMap {
  int clipped = 0;
  int extent = 0;      // rows of dimension row1: no sequence is longer
  int batch_rows = 0;  // rows between the batches of a dense tensor

  FLASH_CUDA_HOST_DEVICE MapRows locate(int first, int len, int head, int batch) const {
    if (!clipped) return {first, head, batch};
    return {extent - len, batch * batch_rows + first + len, head};
  }
};

// K and V of a section of heads: well inside the L2 cache.
constexpr double kSectionBytes = 32e6;

struct FwdSchedule {
  int num_tiles = 0;  // packed q: an upper bound, the device counts
  int q_blocks = 0;   // of one sequence, dense
  int section = 1;    // (batch, head) pairs whose K and V share the L2 cache, dense
  int counter = 0;    // index of the tile counter of this launch
  RowMap q_rows, kv_rows, out_rows;
};

struct FwdArgs {
  CUtensorMap q_map, k_map, v_map, out_map;
  FwdParams params;
  FwdSchedule schedule;
};

// One unit of work, as the scheduler warp hands it to the others (32 bytes of shared memory).
struct alignas(16) FwdWork {
  int q_block, head, batch;  // q_block < 0: no more work
  int q_row0;                // of SeqInfo, and so on
  int seqlen_q, seqlen_q_slot, seqlen_kv, kv_row0;
};

}  // namespace flash_cuda::sm90
