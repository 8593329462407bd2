// The gradient of a broadcast bias, summed in a fixed order (deterministic mode only: otherwise the
// main loop adds to it with atomics).
#include <cuda_runtime.h>

#include "common/bwd_workspace.h"
#include "common/launch_kernel.h"

namespace flash_cuda {
namespace {

constexpr int kDbiasThreads = 256;

__global__ void __launch_bounds__(kDbiasThreads)
    bwd_dbias_kernel(const __grid_constant__ BwdParams p, const float* all, int64_t elements) {
  const FwdParams& f = p.fwd;
  const int64_t heads = f.num_heads_q, rows = f.seqlen_q, cols = f.seqlen_kv;
  const bool sum_batch = p.dbias_batch_stride == 0, sum_head = p.dbias_head_stride == 0;
  const bool sum_row = p.dbias_row_stride == 0, sum_col = p.dbias_col_stride == 0;
  const int64_t n_col = sum_col ? 1 : cols, n_row = sum_row ? 1 : rows;
  const int64_t n_head = sum_head ? 1 : heads;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kDbiasThreads + threadIdx.x;
  if (i >= elements) return;
  const int64_t col = i % n_col, row = i / n_col % n_row, head = i / (n_col * n_row) % n_head;
  const int64_t b = i / (n_col * n_row * n_head);
  float sum = 0.0f;
  for (int64_t bb = b; bb < (sum_batch ? f.batch : b + 1); ++bb) {
    for (int64_t h = head; h < (sum_head ? heads : head + 1); ++h) {
      for (int64_t r = row; r < (sum_row ? rows : row + 1); ++r) {
        const float* line = all + ((bb * heads + h) * rows + r) * cols;
        for (int64_t c = col; c < (sum_col ? cols : col + 1); ++c) sum += line[c];
      }
    }
  }
  p.dbias[b * p.dbias_batch_stride + head * p.dbias_head_stride + row * p.dbias_row_stride +
          col * p.dbias_col_stride] = sum;
}

int64_t elements_of(const BwdParams& p) {
  const FwdParams& f = p.fwd;
  return (p.dbias_batch_stride ? int64_t{f.batch} : 1) *
         (p.dbias_head_stride ? int64_t{f.num_heads_q} : 1) *
         (p.dbias_row_stride ? int64_t{f.seqlen_q} : 1) *
         (p.dbias_col_stride ? int64_t{f.seqlen_kv} : 1);
}

}  // namespace

void zero_dbias(const BwdParams& p, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(elements_of(p)) * sizeof(float);
  check_cuda(cudaMemsetAsync(p.dbias, 0, bytes, stream), "cudaMemsetAsync");
}

void launch_bwd_dbias(const BwdParams& p, const BwdWorkspace& ws, cudaStream_t stream) {
  const int64_t elements = elements_of(p);
  launch_kernel(bwd_dbias_kernel, ceil_div(elements, int64_t{kDbiasThreads}), kDbiasThreads, 0,
                stream, p, static_cast<const float*>(ws.dbias), elements);
}

}  // namespace flash_cuda
