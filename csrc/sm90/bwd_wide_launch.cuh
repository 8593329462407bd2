// Grid, tensor maps and the chain of kernels of one backward call with wide heads.
#pragma once

#include "sm90/bwd_launch.cuh"
#include "sm90/bwd_wide.h"
#include "sm90/bwd_wide_kernel.cuh"

namespace flash_cuda::sm90 {

template <class Tile, DType kDType, bool kGeneral, bool kClipped,
          WideSharing kSharing = WideSharing::kNone>
void launch_wide_main(const BwdMaps& maps, const BwdWideArgs& args, cudaStream_t stream) {
  constexpr int kSmemBytes = BwdWideSmem<Tile>::kBytes;
  static std::atomic<uint64_t> smem_allowed{0};
  auto* kernel = bwd_wide_kernel<Tile, kDType, kGeneral, kClipped, kSharing>;
  allow_dynamic_smem(kernel, kSmemBytes, smem_allowed);
  const int clusters = min_of(args.base.num_draws, args.base.params.fwd.num_sms);
  LaunchShape shape{dim3(static_cast<unsigned>(2 * clusters)), Tile::kThreads, kSmemBytes};
  shape.cluster = 2;
  shape.after_dependency = true;
  launch_kernel(kernel, shape, stream, maps, args);
}

inline int bwd_wide_clusters(const FwdParams& p) { return max_of(p.num_sms / 2, 1); }

template <class Tile, DType kDType>
void launch_bwd_wide_tile(const BwdParams& params, cudaStream_t stream) {
  const FwdParams& p = params.fwd;
  BwdWideArgs args{};
  args.base = bwd_args<Tile>(params, bwd_wide_clusters(p));
  launch_passes<Tile, kDType>(args.base, params, stream, [&] {
    const BwdMaps maps = bwd_maps<Tile>(args.base, args.rows);
    if constexpr (Tile::kBiasStages > 0) {
      launch_wide_main<Tile, kDType, false, false>(maps, args, stream);
    } else if (bwd_is_general(p)) {
      launch_wide_main<Tile, kDType, true, true>(maps, args, stream);
    } else if (bwd_has_lengths(p)) {
      launch_wide_main<Tile, kDType, false, true>(maps, args, stream);
    } else if (args.base.shares.count) {
      if (Tile::kHeadDim <= 192 && params.deterministic) {
        constexpr auto kSharing = Tile::kHeadDim <= 192 ? WideSharing::kKept : WideSharing::kAnew;
        launch_wide_main<Tile, kDType, false, false, kSharing>(maps, args, stream);
      } else {
        launch_wide_main<Tile, kDType, false, false, WideSharing::kAnew>(maps, args, stream);
      }
    } else {
      launch_wide_main<Tile, kDType, false, false>(maps, args, stream);
    }
  });
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd_wide(const BwdParams& params, cudaStream_t stream) {
  const FwdParams& p = params.fwd;
  if (p.bias && bwd_has_bias_tile(params) && !bwd_has_lengths(p)) {
    launch_bwd_wide_tile<BwdWideTile<kHeadDim, kHeadDimV, 1>, kDType>(params, stream);
  } else {
    launch_bwd_wide_tile<BwdWideTile<kHeadDim, kHeadDimV>, kDType>(params, stream);
  }
}

template <int kHeadDim, int kHeadDimV>
size_t bwd_wide_workspace_bytes(const BwdParams& params) {
  using Tile = BwdWideTile<kHeadDim, kHeadDimV>;
  return bwd_workspace_bytes_of<Tile>(params, bwd_wide_clusters(params.fwd));
}

}  // namespace flash_cuda::sm90
