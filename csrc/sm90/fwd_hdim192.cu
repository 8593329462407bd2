#include "sm90/fwd_launch.cuh"

// build: spills allowed in fwd_kernel up to 40 bytes: the general variant, once a tile

namespace flash_cuda::sm90 {

template void launch_fwd<DType::kBFloat16, 192, 192>(const FwdParams&, cudaStream_t);
template void launch_fwd<DType::kFloat16, 192, 192>(const FwdParams&, cudaStream_t);
template size_t fwd_workspace_bytes<192, 192>(const FwdParams&);

}  // namespace flash_cuda::sm90
