// Tensor maps, order of tiles and launch of the forward kernel; which tile serves which call.
#pragma once

#include "common/launch.h"
#include "ptx/packed.h"
#include "sm100/fwd.h"
#include "sm100/fwd_kernel.cuh"

namespace flash_cuda::sm100 {

// The share of polynomial exponentials balances the special function unit against issue slots
// (docs/kernels/sm100_fwd.md); 10.3 has exponentials to spare.
template <int kHeadDim, int kHeadDimV>
struct FwdTiles;
template <>
struct FwdTiles<64, 64> {
  static constexpr int kStages = 10, kEmulated = 32;
};
template <>
struct FwdTiles<96, 96> {
  static constexpr int kStages = 6, kEmulated = 24;
};
template <>
struct FwdTiles<128, 128> {
  static constexpr int kStages = 6, kEmulated = 24;
};
template <>
struct FwdTiles<192, 128> {
  static constexpr int kStages = 8, kEmulated = 16;
};
template <>
struct FwdTiles<256, 256> {
  static constexpr int kStages = 10, kEmulated = 0;
};

// One block a tile; those that run take over from those that wait.
template <class Tile, DType kDType>
void launch_tile(const FwdParams& p, cudaStream_t stream) {
  static std::atomic<uint64_t> smem_allowed{0};
  auto* kernel = fwd_kernel<Tile, kDType>;
  allow_dynamic_smem(kernel, Tile::kSmemBytes, smem_allowed);
  const FwdArgs args =
      fwd_tile_args(p, {Tile::kBlockQ, Tile::kPanelCols, 128, Tile::kBlockKV, 128});
  if (args.num_tiles == 0) return;
  launch_kernel(kernel, {dim3(args.num_tiles), Tile::kThreads, Tile::kSmemBytes}, stream, args);
}

inline bool is_general(const FwdParams& p) {
  return p.softcap != 0.0f || p.alibi_slopes || p.bias || p.strict || !(p.softmax_scale > 0.0f);
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& p, cudaStream_t stream) {
  using Sizes = FwdTiles<kHeadDim, kHeadDimV>;
  if (is_general(p)) {
    launch_tile<FwdTile<kHeadDim, kHeadDimV, Sizes::kStages, 0, true>, kDType>(p, stream);
  } else {
    launch_tile<FwdTile<kHeadDim, kHeadDimV, Sizes::kStages, Sizes::kEmulated>, kDType>(p, stream);
  }
}

}  // namespace flash_cuda::sm100
