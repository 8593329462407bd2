// What the driver says of a GPU.
#pragma once

#include "api/dispatch.h"

namespace flash_cuda {

// Of the GPU `index`, read once. Throws std::runtime_error where CUDA fails, with the versions of
// driver and runtime if they do not go together. All zero in a build without kernels.
const DeviceInfo& device_info(int index);

// The newest CUDA that the driver serves, 13000 for 13.0; 0 where there is no driver, or no kernels
// were built.
int driver_cuda_version();

}  // namespace flash_cuda
