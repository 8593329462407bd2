#include "sm80/fwd_launch.cuh"

namespace flash_cuda::sm80 {

template void launch_fwd<DType::kFloat16, 32, 32>(const FwdParams&, cudaStream_t);
template void launch_fwd<DType::kBFloat16, 32, 32>(const FwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm80
