// The backward for head dims up to 256: sizes, tensor memory and shared memory of its two passes.
#pragma once

#include <cstdint>

namespace flash_cuda::sm100 {

// A pair of thread blocks owns 128 rows of one side, each block 64 of them, while the other side
// passes in blocks of 128 rows. Keys stay and queries pass for dK and dV, queries stay and keys
// pass for dQ: with 256 columns neither tensor memory nor shared memory has room for all three.
template <bool kKeysStay_, bool kGeneral_>
struct BwdWideTile {
  static constexpr bool kKeysStay = kKeysStay_;
  static constexpr bool kGeneral = kGeneral_;  // softcap, ALiBi, bias, any softmax_scale
  static constexpr int kHeadDim = 256;         // of Q, K and of V
  static constexpr int kBlock = 128;           // rows of either side that a pair works on
  static constexpr int kRows = 64;             // of a thread block
  static constexpr int kHalfColumns = 128;     // the columns that a block reads for a gradient
  static constexpr int kScoresWarps = 8, kThreads = 32 * (kScoresWarps + 2);

  // Tensor memory, columns of 512. Products of 128 rows are folded: the upper half of their columns
  // is in the lanes from 64 on.
  static constexpr int kTmemColumns = 512;
  static constexpr int kTmemS = 0, kTmemDp = 64, kTmemGrad = 128;  // and 128 columns behind it

  // Boxes of 64 rows x 64 columns, swizzled over their 128-byte rows; four of them are 64 rows, or
  // 64 columns twice. P and dS have 64 rows and 128 columns.
  static constexpr int kBox = 64, kBoxBytes = kBox * 128;
  static constexpr int kTileBytes = 4 * kBoxBytes, kScoresBytes = 2 * kBoxBytes;
  static constexpr int kStagesStats = 2;  // lse and delta of a block of queries

  // Shared memory, offsets from its 1024-byte aligned start. Gradients are staged over what passes.
  static constexpr int kSmemStay = 0;                              // two tiles: rows
  static constexpr int kSmemRows = kSmemStay + 2 * kTileBytes;     // two tiles: rows
  static constexpr int kSmemColumns = kSmemRows + 2 * kTileBytes;  // columns: one, or two
  static constexpr int kSmemDs = kSmemColumns + (kKeysStay ? 2 : 1) * kTileBytes;
  static constexpr int kSmemP = kSmemDs + kScoresBytes;
  static constexpr int kSmemLse = kSmemP + (kKeysStay ? kScoresBytes : 0);
  static constexpr int kSmemDelta = kSmemLse + kStagesStats * kBlock * 4;
  static constexpr int kSmemExchange = kSmemDelta + kStagesStats * kBlock * 4;
  static constexpr int kSmemBytes = kSmemExchange + 512;
  static_assert(kSmemBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace flash_cuda::sm100
