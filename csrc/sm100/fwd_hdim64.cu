#include "sm100/fwd_launch.cuh"

namespace flash_cuda::sm100 {

template void launch_fwd<DType::kBFloat16, 64, 64>(const FwdParams&, cudaStream_t);
template void launch_fwd<DType::kFloat16, 64, 64>(const FwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm100
