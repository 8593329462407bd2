// Which tile serves which call: one table for all head dimensions, read by fwd_choice.h. The
// figures behind it are in docs/tuning.md.
//
// Short serves rows that see few keys (their tiles end often), Diagonal the others below a diagonal
// or in a window, Long the rest, General every call with a score modification. Tall and
// TallDiagonal stand in for Long and Diagonal where their tiles of more rows end sooner; how long
// those take beside one of Long says kTallTimes. From kPairKeys keys a row on pairs of blocks copy
// K and V together, for tiles of Tall and TallDiagonal where there are such; kPairTimes is
// kTallTimes for them.
//
// Where kSharesTail says so, the last round of Long's tiles is cut into equal shares, if that saves
// enough (fwd_tail.h).
#pragma once

#include "common/params.h"
#include "sm90/fwd_heights.h"
#include "sm90/fwd_tile.h"

namespace flash_cuda::sm90 {

// From how many keys a row on there are pairs: in full calls, of neighbours below a diagonal or in
// a window, of query heads there.
struct PairKeys {
  int full = kUnbounded, neighbours = kUnbounded, heads = kUnbounded;
  constexpr bool any() const { return full < kUnbounded; }
};

struct FwdVariantsBase {
  static constexpr bool kHasTall = false, kSharesTail = false;
  static constexpr int kShortKeys = 0;
  static constexpr PairKeys kPairKeys{};
};

template <int kHeadDim, int kHeadDimV>
struct FwdVariants;

// Four warpgroups with 64 keys a block (three with 96 at head dim 96, which take turns) hide more
// of each other's latency than two with 128; below a diagonal each walks its own range.
template <>
struct FwdVariants<64, 64> : FwdVariantsBase {
  using Long = FwdTile<64, 64, 64, 4, 8>;
  using Diagonal = FwdTile<64, 64, 64, 4, 8, kTrimBlocks>;
  using Short = Long;
  using General = FwdTile<64, 64, 64, 4, 2, kGeneral>;
  using GeneralLong = General;
  static constexpr bool kSharesTail = true;
};
template <>
struct FwdVariants<96, 96> : FwdVariantsBase {
  using Long = FwdTile<96, 96, 96, 3, 4, kPingPong>;
  using Diagonal = FwdTile<96, 96, 96, 3, 4, kPingPong | kTrimBlocks>;
  using Short = FwdTile<96, 96, 128, 2, 2, kPingPong>;
  using General = FwdTile<96, 96, 64, 2, 2, kGeneral>;
  using GeneralLong = General;
  static constexpr bool kSharesTail = true;
  static constexpr int kShortKeys = 1024;
};
// Turns keep the warpgroups apart; since KV ranges come from the scheduler they win at any length.
template <>
struct FwdVariants<128, 128> : FwdVariantsBase {
  using Long = FwdTile<128, 128, 128, 2, 2, kPingPong>;
  using Diagonal = Long;
  using Short = Long;
  using General = FwdTile<128, 128, 64, 2, 2, kPingPong | kGeneral>;
  using GeneralLong = FwdTile<128, 128, 64, 3, 2, kGeneral | kNarrowBias>;
  using Tall = FwdTile<128, 128, 64, 3, 4, kDense | kRagged>;
  using TallDiagonal = FwdTile<128, 128, 64, 3, 4, kTrimBlocks | kDense | kRagged>;
  static constexpr bool kHasTall = true;
  static constexpr TileTimes kTallTimes{1.45, 1.12, 0.88}, kPairTimes{1.42, 1.09, 0.86};
  static constexpr PairKeys kPairKeys{1024, 6144, 2048};
};
template <>
struct FwdVariants<192, 128> : FwdVariantsBase {
  using Long = FwdTile<192, 128, 128, 2, 2, kOutInParts | kPingPong>;
  using Diagonal = Long;
  using Short = Long;
  using General = FwdTile<192, 128, 64, 2, 2, kOutInParts | kGeneral>;
  using GeneralLong = General;
  static constexpr PairKeys kPairKeys{2048, 6144, 4096};
};
template <>
struct FwdVariants<192, 192> : FwdVariantsBase {
  using Long = FwdTile<192, 192, 96, 2, 2, kOutInParts | kPingPong>;
  using Diagonal = Long;
  using Short = Long;
  using General = FwdTile<192, 192, 64, 2, 2, kOutInParts | kGeneral>;
  using GeneralLong = General;
  static constexpr PairKeys kPairKeys{2048, 6144, 4096};
};
template <>
struct FwdVariants<256, 256> : FwdVariantsBase {
  using Long = FwdTile<256, 256, 64, 2, 2, kOutInParts | kPingPong>;
  using Diagonal = Long;
  using Short = Long;
  using General = FwdTile<256, 256, 48, 2, 2, kOutInParts | kGeneral>;
  using GeneralLong = General;
  static constexpr PairKeys kPairKeys{1024, 6144, 2048};
};

}  // namespace flash_cuda::sm90
