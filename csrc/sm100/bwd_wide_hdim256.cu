#include "sm100/bwd_wide_launch.cuh"

namespace flash_cuda::sm100 {

template void launch_bwd_wide<DType::kBFloat16>(const BwdParams&, cudaStream_t);
template void launch_bwd_wide<DType::kFloat16>(const BwdParams&, cudaStream_t);
size_t bwd_wide_workspace_bytes(const BwdParams& params) {
  size_t bytes;
  bwd_wide_workspace(params, &bytes);
  return bytes;
}

}  // namespace flash_cuda::sm100
