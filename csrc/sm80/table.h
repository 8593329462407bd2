// The kernels of this folder, for dispatch.
#pragma once

#include "common/kernel_table.h"

namespace flash_cuda::sm80 {

const KernelTable& kernel_table();

}  // namespace flash_cuda::sm80
