#include "sm80/bwd_launch.cuh"

namespace flash_cuda::sm80 {

template size_t bwd_workspace_bytes<128, 128>(const BwdParams&);
template void launch_bwd<DType::kFloat16, 128, 128>(const BwdParams&, cudaStream_t);
template void launch_bwd<DType::kBFloat16, 128, 128>(const BwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm80
