#include "sm90/bwd_launch.cuh"

namespace flash_cuda::sm90 {

template void launch_bwd<DType::kBFloat16, 64>(const BwdParams&, cudaStream_t);
template void launch_bwd<DType::kFloat16, 64>(const BwdParams&, cudaStream_t);
template size_t bwd_workspace_bytes<64>(const BwdParams&);

}  // namespace flash_cuda::sm90
