#include "sm80/decode_launch.cuh"

namespace flash_cuda::sm80 {

template void launch_decode<DType::kFloat16, 64, 64>(const FwdParams&, cudaStream_t);
template void launch_decode<DType::kBFloat16, 64, 64>(const FwdParams&, cudaStream_t);

}  // namespace flash_cuda::sm80
