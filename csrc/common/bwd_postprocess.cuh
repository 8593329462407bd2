// After the backward main loop: dq from fp32 accumulators to its own type and strides.
//
// A header, so that it is compiled for the very targets of the main loop it reads from: the order
// of a tile's values depends on them (ptx/red.h).
#pragma once

#include "common/bwd_workspace.h"
#include "common/fragment.cuh"
#include "common/mask.h"
#include "common/scheduler.cuh"
#include "ptx/convert.h"
#include "ptx/red.h"

namespace flash_cuda {

constexpr int kPostprocessThreads = 128;

// Adds four neighbouring accumulators from `at` on.
__device__ __forceinline__ void add_accumulators(float (&sum)[4][4], const float* at, int lane) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[t][j] += at[t * 128 + ptx::accumulator_slot(lane, j)];
  }
}

// One thread block serves one tile of one head; a warp turns 16 rows x 32 columns at a time.
template <DType kDType>
__global__ void __launch_bounds__(kPostprocessThreads)
    bwd_postprocess_kernel(const __grid_constant__ BwdParams p, const BwdWorkspace ws) {
  const FwdParams& f = p.fwd;
  const int head = blockIdx.x / ws.tiles, tile = blockIdx.x - head * ws.tiles;
  WorkTile work;
  if (f.cu_seqlens_q) {
    work =
        find_packed_block(f.cu_seqlens_q, f.batch, static_cast<int>(f.total_q), ws.block_q, tile);
  } else {
    const int b = tile / ws.tiles_per_sequence;
    work = {b, head, tile - b * ws.tiles_per_sequence, true};
  }
  if (!work.valid) return;
  const SeqInfo seq = seq_info_or_tail(f, work.batch);
  const KvDeal deal{max_of(ws.copies, 1)};
  BlockRange range{0, 1, 0, 0};  // KV blocks that contribute
  if (ws.copies > 0) {
    range = Mask::make(f, seq.seqlen_q, seq.seqlen_kv)
                .kv_blocks(work.block * ws.block_q, ws.block_q, ws.block_kv);
  }
  const bool all = range.end - range.begin >= 2 * deal.count - 1;
  const float* accumulators = ws.dq + (head * ws.tiles + tile) * (ws.block_q * ws.head_dim);
  const int64_t copy_size = ws.dq_elements(f);
  const int first = work.block * ws.block_q;
  uint16_t* dq = static_cast<uint16_t*>(p.dq) + seq.q_batch * p.dq_stride.batch +
                 head * p.dq_stride.head +
                 (seq.q_row0 + static_cast<int64_t>(first)) * p.dq_stride.row;
  const int lane = threadIdx.x % 32, tiles_n = ws.head_dim / 8;
  const int quad = lane & ~3, corner = lane % 4;
  // Eight columns of a row are spread over a quad: four tiles are read together, and each lane of
  // the quad then stores 16 bytes of one of them.
  for (int i = threadIdx.x / 32; i < ws.block_q / 16 * (tiles_n / 4);
       i += kPostprocessThreads / 32) {
    const int row16 = i / (tiles_n / 4), n = i % (tiles_n / 4) * 4;
    uint32_t packed[2][4];  // [row g or g + 8][tile]
    float sum[4][4] = {};
    for (int c = 0; c < deal.count; ++c) {
      // Nothing was written there? So many blocks in a row have one of every owner.
      if (!all && deal.first_from(range.begin, c) >= range.end) continue;
      add_accumulators(sum, accumulators + c * copy_size + (row16 * tiles_n + n) * 128, lane);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = sum[t][j] * f.softmax_scale;
      packed[0][t] = ptx::pack<kDType>(v[0], v[1]);
      packed[1][t] = ptx::pack<kDType>(v[2], v[3]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t row_words[4];
#pragma unroll
      for (int source = 0; source < 4; ++source) {
        uint32_t mine = 0;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const uint32_t word = __shfl_sync(0xffffffffu, packed[r][t], quad + source);
          if (t == corner) mine = word;
        }
        row_words[source] = mine;
      }
      const int row = row16 * 16 + lane / 4 + 8 * r, col = (n + corner) * 8;
      if (first + row < seq.seqlen_q_slot && col < f.head_dim) {
        *reinterpret_cast<uint4*>(dq + row * p.dq_stride.row + col) =
            make_uint4(row_words[0], row_words[1], row_words[2], row_words[3]);
      }
    }
  }
}

}  // namespace flash_cuda
