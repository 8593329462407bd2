#include "sm90/bwd_wide_launch.cuh"

// build: spills allowed in bwd_wide_kernel up to 48 bytes: of the loader, once a task

namespace flash_cuda::sm90 {

template void launch_bwd_wide<DType::kBFloat16, 192, 192>(const BwdParams&, cudaStream_t);
template void launch_bwd_wide<DType::kFloat16, 192, 192>(const BwdParams&, cudaStream_t);
template size_t bwd_wide_workspace_bytes<192, 192>(const BwdParams&);

}  // namespace flash_cuda::sm90
