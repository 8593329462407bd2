// What the driver says of a GPU.
#pragma once

#include "api/dispatch.h"

namespace flash_cuda {

// Of the GPU `index`, read once. Throws std::runtime_error where CUDA fails, with the versions of
// driver and runtime if they do not go together. All zero in a build without kernels.
const DeviceInfo& device_info(int index);

// "13.0" for 13000; "" where there is no driver, or no kernels were built.
std::string driver_cuda_version();

}  // namespace flash_cuda
