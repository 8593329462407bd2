// Tile sizes of the forward kernel, its shared memory, tensor memory and registers.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash_cuda::sm100 {

// kTilesQ tiles of 128 query rows, blocks of 128 keys. Two Q tiles take turns on the matrix unit;
// where O leaves tensor memory for one only, two blocks of keys do.
//
// kEmulated of a row's 128 exponentials in a block are computed by polynomial. kGeneral: softcap,
// ALiBi, bias, any softmax_scale, and strict calls.
template <int kHeadDim_, int kHeadDimV_, int kStages_, int kEmulated_, bool kGeneral_ = false>
struct FwdTile {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kStages = kStages_;
  static constexpr int kEmulated = kEmulated_;
  static constexpr bool kGeneral = kGeneral_;

  static constexpr int kTilesQ = kHeadDimV <= 128 ? 2 : 1;
  static constexpr int kBlockQ = 128 * kTilesQ, kBlockKV = 128;

  // Warpgroups: softmax of each Q tile, correction, and one of single warps.
  static constexpr int kWarpgroups = kTilesQ + 2;
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kCorrectionWarpgroup = kTilesQ;
  static constexpr int kRegistersEntry = 65536 / kThreads / 8 * 8;
  static constexpr int kRegistersSoftmax = kTilesQ == 1 ? 248 : kHeadDim <= 64 ? 192 : 184;
  static constexpr int kRegistersCorrection = kTilesQ == 1 ? 160 : kHeadDim <= 64 ? 64 : 80;
  static constexpr int kRegistersOther = kTilesQ == 1 ? 88 : 64;
  static_assert(kTilesQ * kRegistersSoftmax + kRegistersCorrection + kRegistersOther <=
                kRegistersEntry * kWarpgroups);

  // A panel is 128 rows of 64 columns, swizzled over its 128-byte rows. Head dims end inside a
  // panel: the copy engine fills up with zeros, and products stop at the head dim.
  static constexpr int kPanelCols = 64, kPanelBytes = 128 * 128;
  static constexpr int kPanelsQK = ceil_div(kHeadDim, kPanelCols);
  static constexpr int kPanelsV = ceil_div(kHeadDimV, kPanelCols);
  // Panels of V that one instruction takes: neighbours in the ring, which has whole groups.
  static constexpr int kGroupV =
      kStages % 2 == 0 && kPanelsQK % 2 == 0 && kPanelsV % 2 == 0 ? 2 : 1;
  static constexpr int kGroupsV = kPanelsV / kGroupV;
  static constexpr int kGroupColsV = kHeadDimV / kGroupsV;
  static_assert(kHeadDimV % kGroupsV == 0 && kGroupColsV % 16 == 0 && kHeadDim % 16 == 0);

  // Tensor memory, columns. All are allocated, so that they start at 0. P of a block lies in the
  // upper half of its S, two keys a column.
  static constexpr int kTmemColumns = 512;
  static constexpr int kTmemS = 0, kTmemP = 64, kTmemO = 256;  // S: two of 128 columns
  static_assert(kTmemO + kTilesQ * kHeadDimV <= kTmemColumns);

  // Shared memory, offsets from its 1024-byte aligned start. O is staged in Q's place where there
  // is no room for both.
  static constexpr int kQTileBytes = kPanelsQK * kPanelBytes;
  static constexpr int kOutTileBytes = kPanelsV * kPanelBytes;
  static constexpr int kSmemLimit = 232448, kBarrierBytes = 3072;
  static constexpr bool kOutOverQ =
      kTilesQ * (kQTileBytes + kOutTileBytes) + kStages * kPanelBytes + kBarrierBytes > kSmemLimit;
  static constexpr int kSmemQ = 0;
  static constexpr int kSmemOut = kOutOverQ ? kSmemQ : kTilesQ * kQTileBytes;
  static constexpr int kOutStride = kOutOverQ ? kQTileBytes : kOutTileBytes;
  static constexpr int kSmemRing =
      kTilesQ * kQTileBytes + (kOutOverQ ? 0 : kTilesQ * kOutTileBytes);
  static constexpr int kSmemBarriers = kSmemRing + kStages * kPanelBytes;
  static constexpr int kSmemBytes = kSmemBarriers + kBarrierBytes;
  static_assert(kSmemBytes <= kSmemLimit, "more shared memory than a block can have");
  static_assert(kOutTileBytes <= kQTileBytes || !kOutOverQ, "O does not fit over Q");
};

}  // namespace flash_cuda::sm100
