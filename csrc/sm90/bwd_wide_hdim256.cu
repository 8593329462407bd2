#include "sm90/bwd_wide_launch.cuh"

// build: spills allowed in bwd_wide_kernel up to 96 bytes: masks and bias of the general variant

namespace flash_cuda::sm90 {

template void launch_bwd_wide<DType::kBFloat16, 256, 256>(const BwdParams&, cudaStream_t);
template void launch_bwd_wide<DType::kFloat16, 256, 256>(const BwdParams&, cudaStream_t);
template size_t bwd_wide_workspace_bytes<256, 256>(const BwdParams&);

}  // namespace flash_cuda::sm90
