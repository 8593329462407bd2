// What the backward passes keep between their kernels, cut out of one allocation.
//
// Query rows are stored in tiles of block_q rows that never straddle sequences: tile i of a dense
// sequence b is number b * tiles_per_sequence + i, of a packed one packed_block_base(...) + i.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/host_device.h"
#include "common/kernel_table.h"
#include "common/kv_deal.h"
#include "common/params.h"
#include "common/scheduler.cuh"

namespace flash_cuda {

// Whether several scores share one element of dbias.
inline bool dbias_is_shared(const BwdParams& p) {
  const FwdParams& f = p.fwd;
  return (p.dbias_batch_stride == 0 && f.batch > 1) ||
         (p.dbias_head_stride == 0 && f.num_heads_q > 1) ||
         (p.dbias_row_stride == 0 && f.seqlen_q > 1) ||
         (p.dbias_col_stride == 0 && f.seqlen_kv > 1);
}

// Copies of dq take at most this much memory together.
constexpr double kDqCopiesBytes = 4e9;

// Whether kernels with so many keys in a block have copies of dq in deterministic mode. With fewer
// keys the copies go through memory so often that to wait for a turn costs less.
FLASH_CUDA_HOST_DEVICE constexpr bool has_dq_copies(int block_kv) { return block_kv >= 128; }

struct BwdWorkspace {
  int block_q = 0, head_dim = 0;  // tile shape of dq; head_dim is the kernel's, not the tensor's
  int tiles_per_sequence = 0;     // dense only
  int64_t tiles = 0;              // of one head
  // Deterministic mode: owners of a head's KV blocks, each with a copy of dq; 0: all blocks add to
  // one, in turn where the order counts.
  int copies = 0;
  int block_kv = 0;           // keys of such a block
  int turns = 1;              // parts of a dq tile that are added to in turn
  float* lse_log2 = nullptr;  // (heads, tiles * block_q): lse * log2(e), +inf: no row here
  float* row_dot = nullptr;   // (heads, tiles * block_q): rowsum(dout * out) - dlse
  float* dq = nullptr;        // (copies | 1, heads, tiles, block_q * head_dim), see ptx/red.h;
                              // a copy has a tile only if its owner has keys for it
  int* turn = nullptr;        // (heads, tiles, turns): KV blocks that have added so far
  float* dbias = nullptr;     // (batch, heads, seqlen_q, seqlen_kv), where a broadcast bias
                              // is to be reduced in a fixed order

  FLASH_CUDA_HOST_DEVICE int tile_base(const FwdParams& p, int q_row0, int batch) const {
    return p.cu_seqlens_q ? packed_block_base(q_row0, batch, block_q) : batch * tiles_per_sequence;
  }

  static BwdWorkspace shape(const BwdParams& p, int block_q, int head_dim, int turns) {
    BwdWorkspace w;
    w.turns = turns;
    w.block_q = block_q;
    w.head_dim = head_dim;
    w.tiles_per_sequence = ceil_div(p.fwd.seqlen_q, block_q);
    w.tiles = p.fwd.cu_seqlens_q ? packed_blocks(p.fwd.total_q, p.fwd.batch, block_q)
                                 : static_cast<int64_t>(w.tiles_per_sequence) * p.fwd.batch;
    return w;
  }
  // In deterministic mode, where every thread block's work is known in advance: packed sequences
  // of any lengths keep to turns. `slots`: thread blocks that run at a time.
  void choose_copies(const BwdParams& p, int block_kv_, int slots) {
    const FwdParams& f = p.fwd;
    if (!p.deterministic || !(p.wanted & kWantDq) || f.cu_seqlens_q || f.cu_seqlens_k) return;
    if (!has_dq_copies(block_kv_)) return;
    block_kv = block_kv_;
    copies = count_kv_owners(static_cast<int64_t>(f.batch) * f.num_heads_kv,
                             ceil_div(f.seqlen_kv, block_kv), block_kv, slots,
                             4.0 * static_cast<double>(dq_elements(f)), kDqCopiesBytes);
  }
  FLASH_CUDA_HOST_DEVICE int64_t dq_elements(const FwdParams& f) const {
    return tiles * f.num_heads_q * block_q * head_dim;
  }
  // Sets the pointers, from `base` on; returns the bytes in use.
  size_t place(const BwdParams& p, char* base) {
    size_t used = 0;
    const auto take = [&](int64_t count) {
      char* at = base + used;
      used += (static_cast<size_t>(count) * 4 + 255) / 256 * 256;
      return at;
    };
    const int64_t all = tiles * p.fwd.num_heads_q;
    lse_log2 = reinterpret_cast<float*>(take(all * block_q));
    row_dot = reinterpret_cast<float*>(take(all * block_q));
    if (p.wanted & kWantDq) {
      dq = reinterpret_cast<float*>(take(dq_elements(p.fwd) * max_of(copies, 1)));
      if (p.deterministic && copies == 0) turn = reinterpret_cast<int*>(take(all * turns));
    }
    if ((p.wanted & kWantDbias) && p.deterministic && dbias_is_shared(p)) {
      dbias = reinterpret_cast<float*>(take(dbias_elements(p.fwd)));
    }
    return used;
  }
  static int64_t dbias_elements(const FwdParams& f) {
    return static_cast<int64_t>(f.batch) * f.num_heads_q * f.seqlen_q * f.seqlen_kv;
  }
};

// lse_log2 and row_dot of every row, zeros in turn and in dq without copies (bwd_preprocess.cu).
void launch_bwd_preprocess(const BwdParams& params, const BwdWorkspace& workspace,
                           cudaStream_t stream);
// dsink, from lse_log2 and row_dot (bwd_preprocess.cu).
void launch_bwd_sink(const BwdParams& params, const BwdWorkspace& workspace, cudaStream_t stream);
// Zeroes params.dbias, where scores are added to it (bwd_dbias.cu).
void zero_dbias(const BwdParams& params, cudaStream_t stream);
// params.dbias from workspace.dbias (bwd_dbias.cu).
void launch_bwd_dbias(const BwdParams& params, const BwdWorkspace& workspace, cudaStream_t stream);

}  // namespace flash_cuda
