// Tile shapes of the forward kernel. docs/tuning.md says what each was measured against.
#pragma once

#include "common/params.h"

namespace flash_cuda::sm80 {

// kPlain: softmax of scaled products under any mask. kGeneral: also score modifications, dropout,
// paged caches, rows that are not 16-byte aligned, and scales that are not positive.
enum class Variant { kPlain, kGeneral };

// Devices with at least this much shared memory a block take the large tiles.
constexpr int kLargeSmem = 160 * 1024;

template <int kHeadDim_, int kHeadDimV_, int kBlockQ_, int kBlockKV_, int kWarps_, bool kQInRegs_,
          int kMinBlocks_>
struct FwdTileShape {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockQ = kBlockQ_, kBlockKV = kBlockKV_;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps_;
  static constexpr int kTilesQ = kBlockQ / (16 * kWarps);  // tiles of 16 rows a warp
  static constexpr bool kQInRegs = kQInRegs_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kStagesK = 2;  // the current block stays readable for a repair

  static constexpr int kBytesQ = kBlockQ * 2 * (kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV);
  static constexpr int kBytesK = kBlockKV * kHeadDim * 2, kBytesV = kBlockKV * kHeadDimV * 2;
  static constexpr int kSmemBytes = kBytesQ + kStagesK * kBytesK + kBytesV;
  static_assert(kBlockQ % (16 * kWarps) == 0);
};

// clang-format off
template <int kHeadDim, int kHeadDimV, bool kLarge, Variant> struct FwdTile;
//                                                                                   d   dv    q  kv  w  Qreg  blocks
template <bool kLarge> struct FwdTile<32, 32, kLarge, Variant::kPlain>     : FwdTileShape< 32,  32, 128, 64, 4, false, 3> {};
template <bool kLarge> struct FwdTile<32, 32, kLarge, Variant::kGeneral>   : FwdTileShape< 32,  32, 128, 64, 4, false, 2> {};
template <bool kLarge> struct FwdTile<64, 64, kLarge, Variant::kPlain>     : FwdTileShape< 64,  64, 128, 64, 4, true,  2> {};
template <bool kLarge> struct FwdTile<64, 64, kLarge, Variant::kGeneral>   : FwdTileShape< 64,  64, 128, 64, 4, false, 2> {};
template <bool kLarge> struct FwdTile<96, 96, kLarge, Variant::kPlain>     : FwdTileShape< 96,  96, 128, 64, 4, false, 2> {};
template <bool kLarge> struct FwdTile<96, 96, kLarge, Variant::kGeneral>   : FwdTileShape< 96,  96,  64, 64, 4, false, 2> {};
template <bool kLarge> struct FwdTile<128, 128, kLarge, Variant::kPlain>   : FwdTileShape<128, 128, 128, 64, 4, false, 2> {};
template <bool kLarge> struct FwdTile<128, 128, kLarge, Variant::kGeneral> : FwdTileShape<128, 128,  64, 64, 4, false, 2> {};
template <Variant v> struct FwdTile<192, 128, true, v>                     : FwdTileShape<192, 128, 128, 64, 8, false, 1> {};
template <Variant v> struct FwdTile<192, 128, false, v>                    : FwdTileShape<192, 128,  64, 64, 4, false, 1> {};
template <Variant v> struct FwdTile<192, 192, true, v>                     : FwdTileShape<192, 192, 128, 64, 8, false, 1> {};
template <Variant v> struct FwdTile<192, 192, false, v>                    : FwdTileShape<192, 192,  64, 64, 4, false, 1> {};
template <Variant v> struct FwdTile<256, 256, true, v>                     : FwdTileShape<256, 256, 128, 64, 8, false, 1> {};
template <Variant v> struct FwdTile<256, 256, false, v>                    : FwdTileShape<256, 256,  64, 32, 4, false, 1> {};
// clang-format on

// Short sequences under a causal mask: smaller tiles waste less of their diagonal blocks.
constexpr int kShortRows = 1024;
template <int kHeadDim, int kHeadDimV>
constexpr bool kHasShortTile = false;
template <>
inline constexpr bool kHasShortTile<128, 128> = true;
template <int kHeadDim, int kHeadDimV>
struct ShortFwdTile;
template <>
struct ShortFwdTile<128, 128> : FwdTileShape<128, 128, 64, 64, 4, false, 3> {};

}  // namespace flash_cuda::sm80
