#include "sm80/bwd_launch.cuh"

// build: spills allowed in bwd_kernel up to 36 bytes: the 99 KB tile, where 9.0 and 10.x have more

namespace flash_cuda::sm80 {

template size_t bwd_workspace_bytes<128, 128>(const BwdParams&);
template void launch_bwd<DType::kFloat16, 128, 128>(const BwdParams&, cudaStream_t);
template void launch_bwd<DType::kBFloat16, 128, 128>(const BwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm80
