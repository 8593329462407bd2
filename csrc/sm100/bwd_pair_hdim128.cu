#include "sm100/bwd_launch.cuh"

namespace flash_cuda::sm100 {

template void launch_bwd_pair<DType::kBFloat16>(const BwdParams&, cudaStream_t);
template void launch_bwd_pair<DType::kFloat16>(const BwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm100
