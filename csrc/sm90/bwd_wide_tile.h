// Tile sizes of the backward for wide heads.
#pragma once

namespace flash_cuda::sm90 {

// A task is kBlockKV keys, half of them in each of the two thread blocks of a cluster; the names
// that bwd_work.cuh and bwd_passes.cuh use.
template <int kHeadDim_, int kHeadDimV_, int kBiasStages_ = 0>
struct BwdWideTile {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockQ = 64;
  static constexpr int kBlockKV = 128;
  static constexpr int kKeys = kBlockKV / 2;  // of a thread block
  // Of the tensor maps: each block loads half of the rows of Q and dO. They end where a sequence
  // does.
  static constexpr int kBoxRowsQ = kBlockQ / 2, kBoxRowsKV = kKeys;
  static constexpr int kQStages = 2;
  // The bias of a step, and dS as its gradient, pass through the staging buffers of dQ; else they
  // are read from and written to memory.
  static constexpr int kBiasStages = kBiasStages_;
  static constexpr int kDoutStages = kHeadDim > 192 ? 1 : 2;  // as many as fit
  static constexpr int kThreads = 384;
  static constexpr int kPanels = kHeadDim / 64, kPanelsV = kHeadDimV / 64;  // of 64 columns
  static constexpr int kPanelBytes = 64 * 128;  // 64 rows, of Q, dO or keys
  // A block makes half of the columns of dQ. They begin or end inside a panel where the number of
  // panels is odd: the first warpgroup then takes the half panel, the second a whole one.
  static constexpr bool kOddPanels = kPanels % 2 == 1;
  static constexpr int kPeerPanels = (kPanels + 1) / 2;  // of the peer's keys, for dQ
  static_assert(kPanels == 3 || kPanels == 4);
  static constexpr int dq_cols(int warpgroup) { return kOddPanels && warpgroup == 0 ? 32 : 64; }
};

}  // namespace flash_cuda::sm90
