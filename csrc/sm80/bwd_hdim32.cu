#include "sm80/bwd_launch.cuh"

// build: spills allowed in (flash_cuda::sm80::Variant)1> up to 64 bytes: score modifications
// build: spills allowed in (flash_cuda::sm80::Variant)0> up to 8 bytes: for 10.3 alone

namespace flash_cuda::sm80 {

template size_t bwd_workspace_bytes<32, 32>(const BwdParams&);
template void launch_bwd<DType::kFloat16, 32, 32>(const BwdParams&, cudaStream_t);
template void launch_bwd<DType::kBFloat16, 32, 32>(const BwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm80
