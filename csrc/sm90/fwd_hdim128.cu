#include "sm90/fwd_launch.cuh"

namespace flash_cuda::sm90 {

template void launch_fwd<DType::kBFloat16, 128, 128>(const FwdParams&, cudaStream_t);
template void launch_fwd<DType::kFloat16, 128, 128>(const FwdParams&, cudaStream_t);
template size_t fwd_workspace_bytes<128, 128>(const FwdParams&);

}  // namespace flash_cuda::sm90
