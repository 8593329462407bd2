// Tile sizes of the forward kernel and the layout of its shared memory.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash_cuda::sm90 {

// Options of a tile. Which shapes use which: fwd_launch.cuh and docs/tuning.md.
enum FwdOption : unsigned {
  kOutInParts = 1,   // O is staged part by part, where there is no room for all of it
  kTrimBlocks = 2,   // every warpgroup walks its own KV range, not the block's
  kPingPong = 4,     // warpgroups take turns at issuing GEMMs
  kDense = 8,        // whole tensors, no chunk, no row without keys
  kGeneral = 16,     // softcap, ALiBi, bias, any softmax_scale
  kNarrowBias = 32,  // a bias only of 16 bits and only by the copy engine
  kPacked = 64,      // queries and keys of packed sequences, all of them, no chunk
  kRagged = 128,     // a warpgroup whose rows all lie behind the last one takes no part in a tile
  kPair = 256,       // two blocks, with tiles that read the same K and V, copy them together
  kShareTail = 512,  // with kDense: the last round of tiles is cut into equal shares
};

// A block computes kBlockQ rows of O, 64 a warpgroup; K and V have kStages stages each.
template <int kHeadDim_, int kHeadDimV_, int kBlockKV_, int kWarpgroups_, int kStages_,
          unsigned kOptions_ = 0>
struct FwdTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockKV = kBlockKV_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kStages = kStages_;
  static constexpr unsigned kOptions = kOptions_;
  FLASH_CUDA_HOST_DEVICE static constexpr bool has(FwdOption option) {
    return (kOptions & option) != 0;
  }

  template <unsigned kMore>
  using With = FwdTile<kHeadDim, kHeadDimV, kBlockKV, kWarpgroups, kStages, kOptions | kMore>;

  static constexpr bool kMayChunk = !has(kDense) && !has(kPacked);
  // A warp of the producer stores what a warpgroup stages; elsewhere warpgroups store themselves.
  static constexpr bool kStoresApart = has(kDense) && kWarpgroups == 2;
  // Blocks of a cluster. Of a pair the first copies K, the second V, into both; or, where K and V
  // have turns in common (kLooksAhead), each copies every other turn.
  static constexpr int kCluster = has(kPair) ? 2 : 1;
  static constexpr int kLoadsK = 0, kLoadsV = kCluster - 1;
  // Warpgroups walk fewer KV blocks than are copied.
  static constexpr bool kMaySkip = has(kTrimBlocks) || has(kPair);
  // Blocks are short and stages many: the loop of fwd_ahead.cuh. With eight of them a block's are
  // released under S of the next one.
  static constexpr bool kLooksAhead = kStages >= 4 && (!has(kPingPong) || kHeadDim < 128);
  static constexpr bool kReleasesLate = kLooksAhead && kStages >= 8;
  // A warp of the producer loads Q: who waits for the last warpgroup to end a tile must not hold up
  // K and V of the next tile for the others.
  static constexpr bool kLoadsQApart = kLooksAhead && kWarpgroups > 2;

  // Where the tiles of a head begin is up to the launcher: one that is low comes where it costs
  // least.
  static constexpr bool kShiftsRows = has(kRagged) && has(kDense);

  static constexpr int kBlockQ = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Registers at entry are the SM's divided by the block's threads, in eights; what the producer
  // gives up goes to the consumers.
  static constexpr int kRegistersEntry = 65536 / kThreads / 8 * 8;
  static constexpr int kRegistersProducer = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kRegistersConsumer =
      min_of((kRegistersEntry * (1 + kWarpgroups) - kRegistersProducer) / kWarpgroups / 8 * 8, 240);

  // A row of a panel is one swizzle width: 64 columns, or 32 where 64 does not divide the head dim.
  static constexpr int kPanelBytes = kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 ? 128 : 64;
  static constexpr int kPanelCols = kPanelBytes / 2;
  static constexpr int kPanelsQK = kHeadDim / kPanelCols;
  static constexpr int kPanelsV = kHeadDimV / kPanelCols;

  // kShareTail: a part of a tile in the workspace, in float4: a thread's rows of O, two references
  // and two sums.
  static constexpr int kPartVectors = 128 * kWarpgroups * (kHeadDimV / 8 + 1);

  // Columns of O that are staged at once.
  static constexpr int kOutCols = !has(kOutInParts) ? kHeadDimV : kHeadDimV > 192 ? 128 : 64;
  static constexpr int kOutParts = kHeadDimV / kOutCols;
  static constexpr int kQSliceBytes = 64 * kHeadDim * 2;    // of one warpgroup
  static constexpr int kOutSliceBytes = 64 * kOutCols * 2;  // of one warpgroup
  static constexpr int kStageBytesK = kBlockKV * kHeadDim * 2;
  static constexpr int kStageBytesV = kBlockKV * kHeadDimV * 2;
  // General variant: a bias in panels of 128 bytes, one for 16 bits a key, two for 32.
  static constexpr int kBiasStages = 2;
  static constexpr int kBiasPanelBytes = 64 * 128;
  static constexpr int kBiasPanels = kHeadDim > 192 || has(kNarrowBias) ? 1 : 2;  // as room allows
  static constexpr int kBiasSliceBytes = kBiasPanels * kBiasPanelBytes;  // of one warpgroup

  // Where shared memory begins in a block that has no other than dynamic one: the system has the
  // first KB. As a constant it leaves less to compute between two GEMMs.
  static constexpr uint32_t kSmemBase = 1024;
  // Offsets from a base aligned to 1024 bytes.
  static constexpr int kSmemQ = 0;
  static constexpr int kSmemOut = kQSliceBytes * kWarpgroups;
  static constexpr int kSmemK = kSmemOut + kOutSliceBytes * kWarpgroups;
  static constexpr int kSmemV = kSmemK + kStages * kStageBytesK;
  static constexpr int kSmemBias = kSmemV + kStages * kStageBytesV;
  static constexpr int kSmemBarriers =
      kSmemBias + (has(kGeneral) ? kBiasStages * kBiasSliceBytes * kWarpgroups : 0);
  static constexpr int kBarrierBytes = 1024;  // barriers, work slots
  static constexpr int kSmemBytes = kSmemBarriers + kBarrierBytes + 1024;

  // Without turns it would run so far ahead of the others that it mistakes one phase of a barrier
  // for another, unless it waits for all that it passes over.
  static_assert(!has(kRagged) || ((has(kPingPong) || kLooksAhead) && !kStoresApart));
  static_assert(kSmemBytes <= 232448, "more shared memory than a block can have");
  static_assert(!has(kPair) || (has(kDense) && (!has(kRagged) || kLooksAhead)), "not written");
  static_assert(!has(kPair) || kBlockQ <= kStages * kBlockKV,
                "who passes over K blocks releases their V later: both must be in the rings");
  static_assert(kHeadDimV % kOutCols == 0 && kOutCols % kPanelCols == 0, "parts are whole panels");
  static_assert(!has(kGeneral) || kBlockKV <= 64, "a block is one box of the bias wide");
  static_assert(kBlockKV % 16 == 0 && (kBlockKV * kPanelBytes) % 1024 == 0, "panels are aligned");
};

}  // namespace flash_cuda::sm90
