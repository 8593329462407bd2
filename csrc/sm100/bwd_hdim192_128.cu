#include "sm100/bwd_launch.cuh"

namespace flash_cuda::sm100 {

template void launch_bwd<DType::kBFloat16, 192, 128>(const BwdParams&, cudaStream_t);
template void launch_bwd<DType::kFloat16, 192, 128>(const BwdParams&, cudaStream_t);
template size_t bwd_workspace_bytes<192>(const BwdParams&);

}  // namespace flash_cuda::sm100
