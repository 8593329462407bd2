#include "sm80/bwd_launch.cuh"

// build: spills allowed in bwd_kernel up to 100 bytes: faster than tiles without (docs/tuning.md)

namespace flash_cuda::sm80 {

template size_t bwd_workspace_bytes<256, 256>(const BwdParams&);
template void launch_bwd<DType::kFloat16, 256, 256>(const BwdParams&, cudaStream_t);
template void launch_bwd<DType::kBFloat16, 256, 256>(const BwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm80
