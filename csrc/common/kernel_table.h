// What a folder of kernels offers to dispatch: an array of rows for each operation.
//
// csrc/smNN/table.cpp defines `const KernelTable& smNN::kernel_table()`; the emulated library of
// one folder exports the same table through the C function `flash_cuda_kernel_table`.
#pragma once

#include <cstddef>

#include "common/params.h"

using cudaStream_t = struct CUstream_st*;

namespace flash_cuda {

// The tile of a call: rows and keys, threads of a block, blocks of a cluster.
struct FwdTileShape {
  int block_q, block_kv, threads, cluster;
};

struct FwdKernel {
  const char* name;  // "sm90_fwd_hdim128"
  int arch;          // folder: 80, 90, 100
  DType dtype;
  int head_dim, head_dim_v;        // the largest served; smaller ones are predicated
  int block_q, block_kv, threads;  // of the plain variant
  // Null: this call is served. Else why not, as text to show ("dropout is served by sm80").
  const char* (*refuse)(const FwdParams&);
  size_t (*workspace_bytes)(const FwdParams&);
  // Throws std::runtime_error on a CUDA error. Never synchronises; safe in a CUDA graph.
  void (*launch)(const FwdParams&, cudaStream_t);
  // Of split-KV kernels: serves FwdParams::dealt_out, which is taken unless the caller cuts.
  bool deals_out = false;
  // The tile that serves this call; null where that is the plain variant's.
  FwdTileShape (*tile)(const FwdParams&) = nullptr;
};

struct BwdKernel {
  const char* name;
  int arch;
  DType dtype;
  int head_dim, head_dim_v;
  int block_q, block_kv, threads;
  const char* (*refuse)(const BwdParams&);
  size_t (*workspace_bytes)(const BwdParams&);
  void (*launch)(const BwdParams&, cudaStream_t);
};

// Rows are tried in order; the first whose head dims fit and that does not refuse serves the call.
struct KernelTable {
  const FwdKernel* fwd = nullptr;
  int num_fwd = 0;
  // Split-KV: writes out_partial and lse_partial, also for one split, and combine follows; out and
  // lse where the call is dealt out. Where q is packed, lse_partial holds -inf before the launch.
  const FwdKernel* decode = nullptr;
  int num_decode = 0;
  const BwdKernel* bwd = nullptr;
  int num_bwd = 0;
  void (*combine)(const CombineParams&, cudaStream_t) = nullptr;
  void (*kv_append)(const KvAppendParams&, cudaStream_t) = nullptr;
};

}  // namespace flash_cuda
