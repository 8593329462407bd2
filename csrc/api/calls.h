// One call of an op from checked arguments to the launch, without torch: the binding allocates
// what a call says it needs, sets the pointers and launches; explain() only looks.
#pragma once

#include <cstddef>

#include "api/args.h"
#include "api/check.h"
#include "api/dispatch.h"
#include "common/kernel_table.h"
#include "common/params.h"

namespace flash_cuda {

// True where no kernel is needed: no rows of queries, or no keys at all.
bool has_queries(const Sizes& sizes);
bool has_keys(const Sizes& sizes);

struct FwdCall {
  FwdParams params;  // out, lse and workspace are null until the binding has them
  const FwdKernel* kernel = nullptr;
  // Given: the kernel writes partials, which this merges.
  void (*combine)(const CombineParams&, cudaStream_t) = nullptr;
  int64_t out_partial_numel = 0, lse_partial_numel = 0;  // float32
  size_t workspace_bytes = 0;
};

struct BwdCall {
  BwdParams params;
  const BwdKernel* kernel = nullptr;
  size_t workspace_bytes = 0;
};

// Each chooses the kernel and fills its params; throws Refusal if no kernel serves the call.
FwdCall prepare_fwd(const FwdArgs& args, const Sizes& sizes, const Kernels& kernels);
BwdCall prepare_bwd(const BwdArgs& args, const Sizes& sizes, const Kernels& kernels);

// Launches the kernel and, after a split one, the merge. Every pointer of `call.params` is set.
void launch(const FwdCall& call, cudaStream_t stream);
void launch(const BwdCall& call, cudaStream_t stream);

CombineParams combine_params(const CombineArgs& args, void* out, DType out_dtype, float* lse);
KvAppendParams kv_append_params(const KvAppendArgs& args);

ScalarType out_dtype_of(const TensorInfo& q);  // that of q; bfloat16 for fp8
// Refuses float64, which no kernel takes.
DType kernel_dtype(const TensorInfo& tensor);

}  // namespace flash_cuda
