// Arguments to params: defaults resolved, strides read, no decisions.
#pragma once

#include "api/args.h"
#include "api/check.h"
#include "api/dispatch.h"
#include "common/params.h"

namespace flash_cuda {

FwdParams fill_fwd_params(const FwdArgs& args, const Sizes& sizes, const DeviceInfo& device);
// Strides of contiguous gradients included; their pointers are null.
BwdParams fill_bwd_params(const BwdArgs& args, const Sizes& sizes, const DeviceInfo& device);

// (batch, row, head) of a tensor with a head dimension, packed or not.
Stride stride_of(const TensorInfo& tensor);

}  // namespace flash_cuda
