// Tile sizes of the backward kernel, and the layout of its shared memory and workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/bwd_workspace.h"
#include "common/host_device.h"
#include "common/params.h"

namespace flash_cuda::sm90 {

// kBlockQ rows of Q and dO stream past a tile of kBlockKV keys; two warpgroups own 64 keys each.
// clang-format off
template <int kHeadDim_, int kBlockQ_, bool kLseInRegisters_, bool kDkInHalves_, int kBiasStages_,
          int kKBuffers_>
struct BwdTileShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockQ = kBlockQ_;
  static constexpr int kBlockKV = 128;
  static constexpr int kStages = 2;                            // of Q and of dO
  static constexpr bool kLseInRegisters = kLseInRegisters_;    // loaded before the GEMMs are issued
  static constexpr bool kDkInHalves = kDkInHalves_;            // with dV, else dV alone
  static constexpr int kBiasStages = kBiasStages_;            // tiles of bias and its gradient
  // Where there is room for two: the next task's K comes while one is at work, and dV is staged in
  // the place of the K that is done with.
  static constexpr int kKBuffers = kKBuffers_;
  static constexpr bool kDvInK = kKBuffers == 2;
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kKeys = kBlockKV / kConsumerWarpgroups;  // of a warpgroup
  static constexpr int kBoxRowsQ = kBlockQ, kBoxRowsKV = kBlockKV;  // of the tensor maps
  static constexpr int kPanels = (kHeadDim + 63) / 64;  // of 64 columns, of an operand tile
  // How the warpgroups share dQ: 64 rows each, half of the columns each, or, where those would be
  // no multiple of 32, the whole block in turns (the first takes the steps of stage 0).
  static constexpr bool kSplitDqRows = kBlockQ == 128;
  static constexpr bool kDqInTurns = !kSplitDqRows && kHeadDim % 64 != 0;
  static constexpr int kThreads = 128 * (1 + kConsumerWarpgroups);
};
template <int kHeadDim> struct BwdTile;
template <int kHeadDim> struct BwdBiasTile;     // with a bias, or softcap and ALiBi together
template <int kHeadDim> struct BwdOrderedTile;  // deterministic mode: two buffers of K cost it 3 %
//                                                      head_dim   q  lse    dk     bias K
template <> struct BwdTile<64>      : BwdTileShape<          64, 128, false, true,  0, 2> {};
template <> struct BwdTile<96>      : BwdTileShape<          96,  64, true,  false, 0, 1> {};
template <> struct BwdTile<128>     : BwdTileShape<         128,  64, true,  false, 0, 2> {};
template <> struct BwdOrderedTile<128> : BwdTileShape<      128,  64, true,  false, 0, 1> {};
template <> struct BwdBiasTile<64>  : BwdTileShape<          64,  64, true,  false, 2, 1> {};
template <> struct BwdBiasTile<128> : BwdTileShape<         128,  64, true,  false, 1, 1> {};
// clang-format on

// Where one call keeps what passes between its three kernels. A row block of a sequence starts at
// a multiple of kBlockQ rows, so that packed sequences never share one:
// block_base(b) = cu_seqlens_q[b] / kBlockQ + b leaves room for every ragged end.
struct BwdWorkspace {
  int64_t row_blocks = 0;  // of one head, over the whole batch
  float* lse2 =
      nullptr;  // (num_heads_q, row_blocks * block_q): lse * log2(e); +inf where no key is seen
  float* delta = nullptr;  // same shape: -(rowsum(dout * out) - dlse)
  float* dq = nullptr;  // (num_heads_q, row_blocks, block_q * head_dim): sums, in accumulator order
  int* dq_turn =
      nullptr;  // (num_heads_q, row_blocks, 2): deterministic mode, whose turn it is to add

  // Where the query heads of a KV head are dealt out to several tasks (`splits`): the gradients of
  // each, (rows, num_heads_kv * splits, head_dim) in the tensors' type.
  void *dk_parts = nullptr, *dv_parts = nullptr;

  // Packed keys of not too many sequences, where that order is the faster one (so not for wide
  // heads): those with most queries first, and how many KV blocks come before each of them, and
  // before the end.
  int *sequences = nullptr, *first_blocks = nullptr;
  static constexpr int kMostSequences = 32;

  int* next_task = nullptr;  // wide heads: the first that no cluster has drawn
  int* zeroed =
      nullptr;           // of each section (dense batches): tasks that have zeroed their part of it
  int* added = nullptr;  // of each section: store warps whose task adds nothing more to dQ
  // Where tasks are shared: dK and dV of each piece, in accumulator order, float32; and of each
  // task how many pieces are done, for up to kJoins groups of threads that each have a part of
  // them.
  static constexpr int kJoins = 4;
  float* pieces = nullptr;
  int* pieces_done = nullptr;
  // (batch, num_heads_q, dbias_rows, seqlen_kv): where deterministic mode sums a repeated bias in a
  // fixed order, dS of every query, or its sum over a row block if all queries share a row.
  float* dbias = nullptr;
  int dbias_rows = 0;

  size_t dbias_bytes(const FwdParams& p) const {
    return size_t(p.batch) * p.num_heads_q * dbias_rows * p.seqlen_kv * sizeof(float);
  }
  FLASH_CUDA_HOST_DEVICE static constexpr size_t piece_floats(int head_dim) {
    return size_t(2) * 128 * head_dim;
  }
  static int max_sections(const FwdParams& p, int splits) {
    return p.cu_seqlens_q || p.cu_seqlens_k ? 0 : p.batch * p.num_heads_kv * splits;
  }
  static int64_t row_blocks_of(const FwdParams& p, int block_q) {
    return p.cu_seqlens_q ? p.total_q / block_q + p.batch
                          : int64_t(p.batch) * ceil_div(p.seqlen_q, block_q);
  }

  // Lays the parts out in `base` (null: only counts) and returns the bytes used.
  size_t assign(void* base, const BwdParams& params, int block_q, int head_dim, int splits = 1,
                int shared_tasks = 0, int piece_slots = 0) {
    const FwdParams& p = params.fwd;
    row_blocks = row_blocks_of(p, block_q);
    char* cursor = static_cast<char*>(base);
    size_t used = 0;
    auto take = [&](size_t bytes) {
      char* at = base ? cursor + used : nullptr;
      used += (bytes + 255) / 256 * 256;
      return at;
    };
    const size_t rows = size_t(p.num_heads_q) * row_blocks * block_q;
    lse2 = reinterpret_cast<float*>(take(rows * sizeof(float)));
    delta = reinterpret_cast<float*>(take(rows * sizeof(float)));
    dq = reinterpret_cast<float*>(take(rows * head_dim * sizeof(float)));
    if (p.cu_seqlens_k && p.batch <= kMostSequences && head_dim <= 128 &&
        (params.deterministic || p.window_right == kUnbounded)) {
      sequences = reinterpret_cast<int*>(take(p.batch * sizeof(int)));
      first_blocks = reinterpret_cast<int*>(take((p.batch + 1) * sizeof(int)));
    }
    next_task = reinterpret_cast<int*>(take(sizeof(int)));
    zeroed = reinterpret_cast<int*>(take(max_sections(p, splits) * sizeof(int)));
    added = reinterpret_cast<int*>(take(max_sections(p, splits) * sizeof(int)));
    pieces = reinterpret_cast<float*>(take(piece_slots * piece_floats(head_dim) * sizeof(float)));
    pieces_done = reinterpret_cast<int*>(take(kJoins * shared_tasks * sizeof(int)));
    if (splits > 1) {
      const size_t rows_kv = p.cu_seqlens_k ? p.total_kv : size_t(p.batch) * p.seqlen_kv;
      dk_parts = take(rows_kv * p.num_heads_kv * splits * p.head_dim * 2);
      dv_parts = take(rows_kv * p.num_heads_kv * splits * p.head_dim_v * 2);
    }
    if (params.deterministic) {
      dq_turn = reinterpret_cast<int*>(take(size_t(p.num_heads_q) * row_blocks * 2 * sizeof(int)));
    }
    if ((params.wanted & kWantDbias) && params.deterministic && dbias_is_shared(params)) {
      dbias_rows = params.dbias_row_stride == 0 ? ceil_div(p.seqlen_q, block_q) : p.seqlen_q;
      dbias = reinterpret_cast<float*>(take(dbias_bytes(p)));
    }
    return used;
  }
};

// First row block of sequence b in the workspace.
FLASH_CUDA_HOST_DEVICE int64_t row_block_base(const FwdParams& p, int b, int block_q) {
  return p.cu_seqlens_q ? p.cu_seqlens_q[b] / block_q + b
                        : int64_t(b) * ceil_div(p.seqlen_q, block_q);
}

}  // namespace flash_cuda::sm90
