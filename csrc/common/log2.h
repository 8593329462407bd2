// Softmax in powers of two.
#pragma once

namespace flash_cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

}  // namespace flash_cuda
