#include "sm80/fwd_launch.cuh"

// build: spills allowed in fwd_kernel up to 88 bytes: the sm_80 build, outside of the products

namespace flash_cuda::sm80 {

template void launch_fwd<DType::kFloat16, 128, 128>(const FwdParams&, cudaStream_t);
template void launch_fwd<DType::kBFloat16, 128, 128>(const FwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm80
