#include "sm80/bwd_launch.cuh"

// build: spills allowed in (flash_cuda::sm80::Variant)1> up to 232 bytes: score modifications

namespace flash_cuda::sm80 {

template size_t bwd_workspace_bytes<96, 96>(const BwdParams&);
template void launch_bwd<DType::kFloat16, 96, 96>(const BwdParams&, cudaStream_t);
template void launch_bwd<DType::kBFloat16, 96, 96>(const BwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm80
