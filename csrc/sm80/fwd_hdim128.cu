#include "sm80/fwd_launch.cuh"

// build: spills allowed in fwd_kernel up to 24 bytes: addresses of the sm_90 build, once a tile

namespace flash_cuda::sm80 {

template void launch_fwd<DType::kFloat16, 128, 128>(const FwdParams&, cudaStream_t);
template void launch_fwd<DType::kBFloat16, 128, 128>(const FwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm80
