// Tile shapes of the backward kernel. docs/tuning.md says what each was measured against.
#pragma once

#include "sm80/fwd_tile.h"

namespace flash_cuda::sm80 {

// A warp owns kKeyTiles tiles of 16 keys. kSplitD warps share them: each computes a part of their
// scores and a part of the head dim of their gradients, with probabilities exchanged through shared
// memory.
template <int kHeadDim_, int kHeadDimV_, int kBlockQ_, int kBlockKV_, int kSplitD_, int kStages_,
          int kWarpsDq_, int kMinBlocks_, int kKeyTiles_ = 1>
struct BwdTileShape {
  using Shape = BwdTileShape;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockQ = kBlockQ_, kBlockKV = kBlockKV_;
  static constexpr int kSplitD = kSplitD_;
  static constexpr int kKeyTiles = kKeyTiles_, kKeyWarps = kBlockKV / (16 * kKeyTiles);
  static constexpr int kWarps = kKeyWarps * kSplitD, kThreads = 32 * kWarps;
  static constexpr int kStages = kStages_;    // buffers of Q, dO and row statistics
  static constexpr int kWarpsDq = kWarpsDq_;  // dQ = dS K: warps along the rows; the rest: columns
  static constexpr int kMinBlocks = kMinBlocks_;

  static constexpr int kWidthS = kBlockQ / kSplitD;  // queries of a warp's scores
  static constexpr int kWidthDk = kHeadDim / kSplitD, kWidthDv = kHeadDimV / kSplitD;
  static constexpr int kTilesDq = kBlockQ / (16 * kWarpsDq);
  static constexpr int kWidthDq = kHeadDim / (kWarps / kWarpsDq);

  static constexpr int kBytesK = kBlockKV * kHeadDim * 2, kBytesV = kBlockKV * kHeadDimV * 2;
  static constexpr int kBytesQ = kBlockQ * kHeadDim * 2, kBytesDo = kBlockQ * kHeadDimV * 2;
  static constexpr int kBytesStats = kBlockQ * 4 * 2;
  static constexpr int kBytesStage = kBytesQ + kBytesDo + kBytesStats;
  static constexpr int kBytesScores = kBlockKV * kBlockQ * 2;  // dS; P too where warps share keys
  static constexpr int kBytesPlace = 16;
  static constexpr int kSmemBytes = kBytesK + kBytesV + kStages * kBytesStage +
                                    kBytesScores * (kSplitD > 1 ? 2 : 1) + kBytesPlace;
  static_assert(kWidthS % 16 == 0 && kWidthDk % 16 == 0 && kWidthDv % 16 == 0);
  static_assert(kWidthDq % 16 == 0 && kBlockQ % (16 * kWarpsDq) == 0);
};

// clang-format off
template <int kHeadDim, int kHeadDimV, SmemClass, Variant> struct BwdTile;
//                                                                                      d   dv   q   kv split st dq blocks keys
template <SmemClass s> struct BwdTile<32, 32, s, Variant::kPlain>            : BwdTileShape< 32,  32, 64,  64, 1, 1, 2, 3> {};
template <SmemClass s> struct BwdTile<32, 32, s, Variant::kGeneral>          : BwdTileShape< 32,  32, 64,  64, 1, 2, 2, 2> {};
template <SmemClass s> struct BwdTile<64, 64, s, Variant::kPlain>            : BwdTileShape< 64,  64, 32, 128, 1, 2, 1, 2, 2> {};
template <> struct BwdTile<64, 64, SmemClass::k99, Variant::kPlain>          : BwdTileShape< 64,  64, 64,  64, 1, 1, 2, 2> {};
template <SmemClass s> struct BwdTile<64, 64, s, Variant::kGeneral>          : BwdTileShape< 64,  64, 64,  64, 1, 2, 2, 2> {};
template <SmemClass s, Variant v> struct BwdTile<96, 96, s, v>               : BwdTileShape< 96,  96, 64,  64, 1, 1, 2, 2> {};
template <SmemClass s> struct BwdTile<128, 128, s, Variant::kPlain>          : BwdTileShape<128, 128, 64, 128, 2, 2, 2, 1, 2> {};
template <> struct BwdTile<128, 128, SmemClass::k99, Variant::kPlain>        : BwdTileShape<128, 128, 64,  64, 2, 1, 2, 1, 2> {};
template <SmemClass s> struct BwdTile<128, 128, s, Variant::kGeneral>        : BwdTileShape<128, 128, 32,  64, 1, 1, 2, 2> {};
template <SmemClass s> struct BwdTile<192, 128, s, Variant::kPlain>          : BwdTileShape<192, 128, 64,  64, 4, 2, 2, 1, 2> {};
template <SmemClass s> struct BwdTile<192, 128, s, Variant::kGeneral>        : BwdTileShape<192, 128, 32,  64, 2, 2, 2, 1> {};
template <> struct BwdTile<192, 128, SmemClass::k99, Variant::kPlain>         : BwdTileShape<192, 128, 32,  64, 2, 1, 2, 1> {};
template <> struct BwdTile<192, 128, SmemClass::k99, Variant::kGeneral>       : BwdTileShape<192, 128, 32,  64, 2, 1, 2, 1> {};
template <SmemClass s> struct BwdTile<192, 192, s, Variant::kPlain>          : BwdTileShape<192, 192, 64,  64, 4, 2, 2, 1, 2> {};
template <SmemClass s> struct BwdTile<192, 192, s, Variant::kGeneral>        : BwdTileShape<192, 192, 32,  64, 2, 2, 2, 1> {};
template <> struct BwdTile<192, 192, SmemClass::k99, Variant::kPlain>         : BwdTileShape<192, 192, 32,  64, 2, 1, 2, 1> {};
template <> struct BwdTile<192, 192, SmemClass::k99, Variant::kGeneral>       : BwdTileShape<192, 192, 32,  64, 2, 1, 2, 1> {};
template <> struct BwdTile<256, 256, SmemClass::k227, Variant::kPlain>       : BwdTileShape<256, 256, 64,  64, 4, 2, 2, 1, 2> {};
template <> struct BwdTile<256, 256, SmemClass::k163, Variant::kPlain>       : BwdTileShape<256, 256, 64,  64, 4, 1, 2, 1, 2> {};
template <SmemClass s> struct BwdTile<256, 256, s, Variant::kGeneral>        : BwdTileShape<256, 256, 32,  64, 2, 2, 2, 1> {};
template <> struct BwdTile<256, 256, SmemClass::k99, Variant::kPlain>         : BwdTileShape<256, 256, 32,  32, 2, 1, 2, 1> {};
template <> struct BwdTile<256, 256, SmemClass::k99, Variant::kGeneral>       : BwdTileShape<256, 256, 32,  32, 2, 1, 2, 1> {};
// clang-format on

}  // namespace flash_cuda::sm80
