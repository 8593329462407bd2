// Tile shapes of the forward kernel. docs/tuning.md says what each was measured against.
#pragma once

#include <type_traits>

#include "common/params.h"

namespace flash_cuda::sm80 {

// kPlain: softmax of scaled products under any mask. kGeneral: also score modifications, dropout,
// paged caches, rows that are not 16-byte aligned, and scales that are not positive.
enum class Variant { kPlain, kGeneral };

// Shared memory that a thread block may have: 99 KB (8.6, 8.9, 12.x), 163 KB (8.0), 227 KB
// (9.0, 10.x).
enum class SmemClass { k99, k163, k227 };

constexpr int smem_bytes(SmemClass smem) {
  return (smem == SmemClass::k99 ? 99 : smem == SmemClass::k163 ? 163 : 227) * 1024;
}
// Calls `body` with the class of a device, as an integral_constant.
template <class Body>
decltype(auto) with_smem_class(int max_smem_per_block, Body body) {
  if (max_smem_per_block >= smem_bytes(SmemClass::k227)) {
    return body(std::integral_constant<SmemClass, SmemClass::k227>{});
  }
  if (max_smem_per_block >= smem_bytes(SmemClass::k163)) {
    return body(std::integral_constant<SmemClass, SmemClass::k163>{});
  }
  return body(std::integral_constant<SmemClass, SmemClass::k99>{});
}

// Devices with at least this much take the large tiles of the split-KV kernel.
constexpr int kLargeSmem = 160 * 1024;

template <int kHeadDim_, int kHeadDimV_, int kBlockQ_, int kBlockKV_, int kWarps_, bool kQInRegs_,
          int kMinBlocks_>
struct FwdTileShape {
  using Shape = FwdTileShape;  // kernels are instances of shapes: equal rows of the table share one
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockQ = kBlockQ_, kBlockKV = kBlockKV_;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps_;
  static constexpr int kTilesQ = kBlockQ / (16 * kWarps);  // tiles of 16 rows a warp
  static constexpr bool kQInRegs = kQInRegs_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kStages = 2;  // of K and of V

  static constexpr int kBytesQ = kBlockQ * 2 * (kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV);
  static constexpr int kBytesK = kBlockKV * kHeadDim * 2, kBytesV = kBlockKV * kHeadDimV * 2;
  static constexpr int kSmemBytes = kBytesQ + kStages * (kBytesK + kBytesV);
  static_assert(kBlockQ % (16 * kWarps) == 0);
};

// clang-format off
template <int kHeadDim, int kHeadDimV, SmemClass, Variant> struct FwdTile;
//                                                                                        d   dv    q  kv  w  Qreg  blocks
template <SmemClass s> struct FwdTile<32, 32, s, Variant::kPlain>              : FwdTileShape< 32,  32,  64, 32, 2, false, 7> {};
template <SmemClass s> struct FwdTile<32, 32, s, Variant::kGeneral>            : FwdTileShape< 32,  32,  64, 64, 4, false, 2> {};
template <SmemClass s> struct FwdTile<64, 64, s, Variant::kPlain>              : FwdTileShape< 64,  64,  64, 64, 2, false, 4> {};
template <> struct FwdTile<64, 64, SmemClass::k99, Variant::kPlain>            : FwdTileShape< 64,  64, 128, 64, 4, false, 2> {};
template <SmemClass s> struct FwdTile<64, 64, s, Variant::kGeneral>            : FwdTileShape< 64,  64,  64, 64, 4, false, 2> {};
template <SmemClass s> struct FwdTile<96, 96, s, Variant::kPlain>              : FwdTileShape< 96,  96, 128, 64, 4, false, 2> {};
template <SmemClass s> struct FwdTile<96, 96, s, Variant::kGeneral>            : FwdTileShape< 96,  96,  64, 64, 4, false, 2> {};
template <SmemClass s> struct FwdTile<128, 128, s, Variant::kPlain>            : FwdTileShape<128, 128, 128, 48, 4, false, 2> {};
template <SmemClass s> struct FwdTile<128, 128, s, Variant::kGeneral>          : FwdTileShape<128, 128,  64, 64, 4, false, 2> {};
template <SmemClass s, Variant v> struct FwdTile<192, 128, s, v>               : FwdTileShape<192, 128, 128, 64, 8, false, 1> {};
template <Variant v> struct FwdTile<192, 128, SmemClass::k99, v>               : FwdTileShape<192, 128,  64, 32, 4, false, 1> {};
template <SmemClass s, Variant v> struct FwdTile<192, 192, s, v>               : FwdTileShape<192, 192, 128, 64, 8, false, 1> {};
template <Variant v> struct FwdTile<192, 192, SmemClass::k99, v>               : FwdTileShape<192, 192,  64, 32, 4, false, 1> {};
template <SmemClass s, Variant v> struct FwdTile<256, 256, s, v>               : FwdTileShape<256, 256, 128, 32, 8, false, 1> {};
template <> struct FwdTile<256, 256, SmemClass::k227, Variant::kPlain>         : FwdTileShape<256, 256, 128, 64, 8, false, 1> {};
template <Variant v> struct FwdTile<256, 256, SmemClass::k99, v>               : FwdTileShape<256, 256,  64, 32, 4, false, 1> {};
// clang-format on

}  // namespace flash_cuda::sm80
