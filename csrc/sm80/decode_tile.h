// Tile shapes of the split-KV kernel. docs/tuning.md says what each was measured against.
#pragma once

#include "sm80/fwd_tile.h"

namespace flash_cuda::sm80 {

// kRowWarps warps own 16 rows each; kKeyWarps share the keys of a block among themselves.
template <int kHeadDim_, int kHeadDimV_, int kBlockKV_, int kRowWarps_, int kStages_,
          int kMinBlocks_>
struct DecodeTileShape {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kRowWarps = kRowWarps_, kBlockQ = 16 * kRowWarps;
  static constexpr int kBlockKV = kBlockKV_;
  static constexpr int kKeyWarps = kRowWarps == 1 ? kBlockKV / 16 : 1;
  static constexpr int kKeys = kBlockKV / kKeyWarps;  // of a block, for one warp
  static constexpr int kWarps = kRowWarps * kKeyWarps, kThreads = 32 * kWarps;
  static constexpr int kStages = kStages_;  // of K and V together
  static constexpr int kMinBlocks = kMinBlocks_;

  static constexpr int kBytesQ = kBlockQ * kHeadDim * 2, kBytesQv = kBlockQ * kHeadDimV * 2;
  static constexpr int kBytesK = kBlockKV * kHeadDim * 2, kBytesV = kBlockKV * kHeadDimV * 2;
  static constexpr int kBytesStage = kBytesK + kBytesV;
  static constexpr int kSmemBytes = kBytesQ + kStages * kBytesStage;
  // The general variant keeps qv in the place of the last stage.
  static_assert(kBytesQv <= kBytesStage && kStages >= 2);
  // The parts of the key warps are merged in the place of the stages.
  static constexpr int kBytesMerge = kKeyWarps * (kBlockQ * kHeadDimV + 2 * 16) * 4;
  static_assert(kKeyWarps == 1 || kBytesMerge <= kStages * kBytesStage);
};

// The tile of decode_stream.cuh and decode_even.cuh: kRowTiles times 16 rows, 16 keys a step and
// warp.
template <int kHeadDim_, int kHeadDimV_, int kRowTiles_, int kWarps_, int kStages_, int kMinBlocks_,
          bool kQueryInRegisters_>
struct StreamTileShape {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kRowTiles = kRowTiles_, kBlockQ = 16 * kRowTiles;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kBlockKV = 16 * kWarps;
  static constexpr int kStages = kStages_;  // of 16 rows of K and V together, for each warp
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr bool kQueryInRegisters = kQueryInRegisters_;

  static constexpr int kBytesQ = kBlockQ * kHeadDim * 2;
  static constexpr int kBytesStepK = 16 * kHeadDim * 2;
  static constexpr int kBytesStep = kBytesStepK + 16 * kHeadDimV * 2;
  static constexpr int kBytesRings = kWarps * kStages * kBytesStep;
  // The warps are merged in the place of the rings; rows are 8 floats longer, against bank
  // conflicts.
  static constexpr int kMergeRowFloats = kHeadDimV + 8;
  static constexpr int kBytesMerge = kWarps * kBlockQ * (kMergeRowFloats + 2) * 4;
  static constexpr int kSmemBytes =
      kBytesQ + (kBytesRings > kBytesMerge ? kBytesRings : kBytesMerge);
  static_assert(kStages >= 2 && kThreads % kBlockQ == 0);
};

// clang-format off
template <int kHeadDim, int kHeadDimV, bool kLarge, int kRowTiles> struct StreamTile;
//                                                                             d   dv  m  w st b  q
template <bool kLarge> struct StreamTile<64, 64, kLarge, 1>  : StreamTileShape< 64,  64, 1, 4, 5, 2, true> {};
template <bool kLarge> struct StreamTile<64, 64, kLarge, 2>  : StreamTileShape< 64,  64, 2, 4, 5, 2, true> {};
template <> struct StreamTile<128, 128, true, 1>             : StreamTileShape<128, 128, 1, 4, 3, 2, true> {};
template <> struct StreamTile<128, 128, true, 2>             : StreamTileShape<128, 128, 2, 4, 3, 2, false> {};
template <> struct StreamTile<128, 128, false, 1>            : StreamTileShape<128, 128, 1, 4, 2, 1, true> {};
template <> struct StreamTile<128, 128, false, 2>            : StreamTileShape<128, 128, 2, 4, 2, 1, false> {};
template <> struct StreamTile<256, 256, true, 1>             : StreamTileShape<256, 256, 1, 4, 3, 1, false> {};
template <> struct StreamTile<256, 256, false, 1>            : StreamTileShape<256, 256, 1, 2, 2, 1, false> {};
// Of decode_even.cuh where there are fewer tiles than SMs and 227 KB of shared memory: one thread
// block an SM, so that there are fewer pieces to merge.
template <int kHeadDim, int kRowTiles> struct FewTile;
template <> struct FewTile<64, 1>                            : StreamTileShape< 64,  64, 1, 8, 5, 1, true> {};
template <> struct FewTile<64, 2>                            : StreamTileShape< 64,  64, 2, 8, 5, 1, true> {};
template <> struct FewTile<128, 1>                           : StreamTileShape<128, 128, 1, 8, 3, 1, true> {};
template <> struct FewTile<128, 2>                           : StreamTileShape<128, 128, 2, 8, 3, 1, false> {};
// clang-format on

// The tile of decode_kernel.cuh: 16 rows, whose warps share the keys, or 64.
// clang-format off
template <int kHeadDim, int kHeadDimV, bool kLarge, int kRowWarps> struct DecodeTile;
//                                                                             d   dv  kv  rows st blocks
template <bool kLarge, int r> struct DecodeTile<64, 64, kLarge, r>   : DecodeTileShape< 64,  64, 64, r, 4, 2> {};
template <int r> struct DecodeTile<128, 128, true, r>                : DecodeTileShape<128, 128, 64, r, 3, 2> {};
template <int r> struct DecodeTile<128, 128, false, r>               : DecodeTileShape<128, 128, 64, r, 2, 1> {};
template <int r> struct DecodeTile<256, 256, true, r>                : DecodeTileShape<256, 256, 32, r, 3, 1> {};
template <int r> struct DecodeTile<256, 256, false, r>               : DecodeTileShape<256, 256, 32, r, 2, 1> {};
// clang-format on

}  // namespace flash_cuda::sm80
