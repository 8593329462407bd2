#include "sm90/fwd_launch.cuh"

namespace flash_cuda::sm90 {

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& p, cudaStream_t stream) {
  launch_tile<FwdTile<128, 128, 128, 2, 2>, kDType>(p, stream);
}

template void launch_fwd<DType::kBFloat16, 128, 128>(const FwdParams&, cudaStream_t);
template void launch_fwd<DType::kFloat16, 128, 128>(const FwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm90
