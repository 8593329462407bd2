#include "sm80/decode_launch.cuh"

// build: spills allowed in decode_kernel up to 48 bytes: 64 general rows, the 99 KB tile

namespace flash_cuda::sm80 {

template void launch_decode<DType::kFloat16, 256, 256>(const FwdParams&, cudaStream_t);
template void launch_decode<DType::kBFloat16, 256, 256>(const FwdParams&, cudaStream_t);
template size_t decode_workspace_bytes<256, 256>(const FwdParams&);

}  // namespace flash_cuda::sm80
