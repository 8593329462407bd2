// Tile sizes of the backward kernel, its shared memory, tensor memory and registers.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash_cuda::sm100 {

// A tile of 128 keys stays, blocks of 128 queries pass. kGeneral: softcap, ALiBi, bias, any
// softmax_scale.
template <int kHeadDim_, int kHeadDimV_, int kStagesQ_, int kStagesDout_, bool kGeneral_>
struct BwdTile {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kStagesQ = kStagesQ_, kStagesDout = kStagesDout_;
  // dK of a block is its last product, and follows what reads its dO, lse and delta: the memory of
  // Q being free tells of theirs, too, unless they have fewer stages.
  static constexpr int kStagesStats = 2;  // lse and delta of a block of queries
  static constexpr bool kDoutHasEmpty = kStagesDout < kStagesQ;
  static_assert(kStagesQ <= kStagesStats);
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kPair = false;
  static constexpr int kBlockQ = 128, kBlockKV = 128;
  static constexpr int kBoxRows = 128;  // rows that are loaded together
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);

  // Warpgroups: dQ, two for P and dS (half of the queries each), one of single warps.
  static constexpr int kThreads = 512;
  static constexpr int kRegistersReduce = 88, kRegistersScores = 176, kRegistersOther = 72;
  static_assert(kRegistersReduce + 2 * kRegistersScores + kRegistersOther <= 512);

  // Panels of 128 rows x 64 columns, swizzled over their 128-byte rows. Head dims end inside a
  // panel: the copy engine fills up with zeros, and products stop at the head dim.
  static constexpr int kPanelCols = 64, kPanelBytes = 128 * 128;
  static constexpr int kPanelsQK = ceil_div(kHeadDim, kPanelCols);
  static constexpr int kPanelsV = ceil_div(kHeadDimV, kPanelCols);
  static constexpr int kBytesQK = kPanelsQK * kPanelBytes, kBytesV = kPanelsV * kPanelBytes;

  // Tensor memory, columns; all are allocated, so that they start at 0. P lies over S and dS over
  // dP, two queries a column, each half of the queries in a place of its own.
  //
  // In turns: dV, dK, S and dP leave no room for dQ, nor for S and dP side by side. dP covers the
  // upper half of S, and dQ all of S and dP, so that one product waits for the readers of the last.
  static constexpr int kTmemColumns = 512;
  static constexpr bool kInTurns = 256 + kHeadDim + kHeadDimV > kTmemColumns;
  static constexpr int kTmemS = kInTurns ? kHeadDim + kHeadDimV : 0;
  static constexpr int kTmemDv = kInTurns ? 0 : 128;
  static constexpr int kTmemDp = kInTurns ? kTmemS + 64 : kTmemDv + kHeadDimV;
  static constexpr int kTmemDk = kInTurns ? kHeadDimV : kTmemDp + 128;
  // Otherwise dQ has columns of its own or those of dP.
  static constexpr bool kDqOverDp = !kInTurns && kTmemDk + 2 * kHeadDim > kTmemColumns;
  static constexpr int kTmemDq = kInTurns ? kTmemS : kDqOverDp ? kTmemDp : kTmemDk + kHeadDim;
  static constexpr int kHalfP = kInTurns ? 32 : 64, kHalfDs = 64;  // from one half to the other
  static_assert(kTmemDp + 128 <= kTmemColumns && kTmemDq + kHeadDim <= kTmemColumns);
  static_assert(!kDqOverDp || kHeadDim <= 128);

  // dQ goes through registers in batches of 16 rows, and through shared memory in pieces of them; a
  // warp has a ring of buffers.
  static constexpr int kBatchCols = kHeadDim <= 128 ? kHeadDim : kHeadDim / 2;
  static constexpr int kPieceCols = kBatchCols % 64 == 0 ? 64 : 32;
  static constexpr int kPieceBytes = 16 * kPieceCols * 4;
  static constexpr int kPieceBuffers = 8192 / kPieceBytes;

  // Shared memory, offsets from its 1024-byte aligned start. dV and dK are staged over dO and Q.
  static constexpr int kSmemK = 0, kSmemV = kSmemK + kBytesQK;
  static constexpr int kSmemQ = kSmemV + kBytesV;
  static constexpr int kSmemDout = kSmemQ + kStagesQ * kBytesQK;
  static constexpr int kSmemDs = kSmemDout + kStagesDout * kBytesV;
  static constexpr int kSmemDq = kSmemDs + 2 * kPanelBytes;
  static constexpr int kSmemLse = kSmemDq + 4 * kPieceBuffers * kPieceBytes;
  static constexpr int kSmemDelta = kSmemLse + kStagesStats * kBlockQ * 4;
  static constexpr int kSmemExchange = kSmemDelta + kStagesStats * kBlockQ * 4;
  static constexpr int kSmemBytes = kSmemExchange + 512;
  static_assert(kSmemBytes <= 232448, "more shared memory than a block can have");
};

// Two thread blocks with 128 keys each, of whose products each reads half of Q, dO and K: head dims
// up to 128.
template <bool kGeneral_>
struct BwdPairTile {
  static constexpr int kHeadDim = 128, kHeadDimV = 128;
  static constexpr bool kGeneral = kGeneral_, kPair = true;
  static constexpr int kBlockQ = 128, kBlockKV = 128;  // of a thread block
  static constexpr int kBoxRows = 64;
  static constexpr int kStagesQ = 1, kStagesDout = 1, kStagesStats = 2;

  static constexpr int kThreads = 512;
  static constexpr int kRegistersReduce = 88, kRegistersScores = 176, kRegistersOther = 72;

  static constexpr int kPanelCols = 64, kPanelBytes = 128 * 128;
  static constexpr int kPanelsQK = 2, kPanelsV = 2;
  static constexpr int kBytesQK = 2 * kPanelBytes, kBytesV = 2 * kPanelBytes;

  // dQ is folded: a thread block has 64 rows, whose second 64 columns are in the lanes from 64 on.
  // It lies in the half of S that P leaves free.
  static constexpr int kTmemColumns = 512;
  static constexpr int kTmemS = 0, kTmemDq = 64, kTmemDv = 128, kTmemDp = 256, kTmemDk = 384;
  static constexpr int kHalfP = 32, kHalfDs = 64;

  static constexpr int kBatchCols = 64, kPieceCols = 32;
  static constexpr int kPieceBytes = 16 * kPieceCols * 4, kPieceBuffers = 2;

  // Q and dO, each: 64 rows whole, then 64 columns of all 128 rows. kSmemKCols: 64 columns of the
  // pair's keys. dS: 64 queries against the pair's keys; kSmemOutgoing: what the peer gets.
  static constexpr int kSmemK = 0, kSmemV = kSmemK + kBytesQK, kSmemKCols = kSmemV + kBytesV;
  static constexpr int kSmemQ = kSmemKCols + 2 * kPanelBytes;
  static constexpr int kSmemDout = kSmemQ + 2 * kPanelBytes;
  static constexpr int kSmemDs = kSmemDout + 2 * kPanelBytes;
  static constexpr int kSmemOutgoing = kSmemDs + 2 * kPanelBytes;
  static constexpr int kSmemDq = kSmemOutgoing + kPanelBytes;
  static constexpr int kSmemLse = kSmemDq + 4 * kPieceBuffers * kPieceBytes;
  static constexpr int kSmemDelta = kSmemLse + kStagesStats * kBlockQ * 4;
  static constexpr int kSmemExchange = kSmemDelta + kStagesStats * kBlockQ * 4;
  static constexpr int kSmemBytes = kSmemExchange + 512;
  static_assert(kSmemBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace flash_cuda::sm100
