// Every check of an argument, for every op and backend: same text on a GPU, on the CPU and in
// explain(). Pure functions over shapes, strides, dtypes, devices and options; they read no tensor
// data (those of check_lengths.cpp do) and build text only when they refuse.
#pragma once

#include <string>

#include "api/args.h"
#include "api/refusal.h"

namespace flash_cuda {

// What the shapes of a call say, once they are known to agree.
struct Sizes {
  int64_t batch = 0;
  int64_t seqlen_q = 0;   // packed: max_seqlen_q, or total_q without the hint
  int64_t seqlen_kv = 0;  // packed: max_seqlen_k, or total_kv; paged: pages * page_size
  int64_t total_q = 0, total_kv = 0;
  int64_t num_heads_q = 0, num_heads_kv = 0;
  int64_t head_dim = 0, head_dim_v = 0;
  int64_t page_size = 0, num_pages = 0;  // 0: not paged
};

// Each throws Refusal on the first argument that does not fit.
Sizes check_fwd(const FwdArgs& args);
Sizes check_bwd(const BwdArgs& args);
void check_combine(const CombineArgs& args);
void check_kv_append(const KvAppendArgs& args);

// The values of lengths, offsets, pages and cache rows, whose `data` must be readable here: reading
// them from a GPU costs a synchronisation, so there these run only where FLASH_CUDA_DEBUG=1 asks
// for it. On CPU tensors check_places and check_append_lengths always run: nothing is read or
// written outside the tensors. check_lengths also refuses what every backend cuts to fit.
void check_places(const FwdArgs& args, const Sizes& sizes);
void check_lengths(const FwdArgs& args, const Sizes& sizes);
void check_append_lengths(const KvAppendArgs& args);
bool debug_mode();

std::string shape_text(const TensorInfo& tensor);   // "(2, 128, 4, 64)"
std::string device_text(const TensorInfo& tensor);  // "cuda:0"

}  // namespace flash_cuda
