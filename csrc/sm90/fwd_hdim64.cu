#include "sm90/fwd_launch.cuh"

namespace flash_cuda::sm90 {

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& p, cudaStream_t stream) {
  // Long rows without a diagonal keep three warpgroups busy; else smaller tiles end sooner.
  const bool large = p.window_right == kUnbounded && p.seqlen_kv >= 3072;
  if (large) {
    launch_tile<FwdTile<64, 64, 128, 3, 4>, kDType>(p, stream);
  } else {
    launch_tile<FwdTile<64, 64, 128, 2, 4, kQInRegisters | kTrimBlocks | kHalfDiagonal>, kDType>(
        p, stream);
  }
}

template void launch_fwd<DType::kBFloat16, 64, 64>(const FwdParams&, cudaStream_t);
template void launch_fwd<DType::kFloat16, 64, 64>(const FwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm90
