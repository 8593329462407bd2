#include "sm80/decode_launch.cuh"

namespace flash_cuda::sm80 {

template void launch_decode<DType::kFloat16, 64, 64>(const FwdParams&, cudaStream_t);
template void launch_decode<DType::kBFloat16, 64, 64>(const FwdParams&, cudaStream_t);
template size_t decode_workspace_bytes<64, 64>(const FwdParams&);

}  // namespace flash_cuda::sm80
