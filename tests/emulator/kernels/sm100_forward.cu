// The Blackwell forward kernel by itself, one element type and variant, for planted mistakes.
// The test puts copies of csrc/sm100's headers, changed, beside a copy of this file.
#include "fwd_launch.cuh"
#include "test_api.h"

namespace flash_cuda::sm100 {
namespace {

// q, k, v, out: (rows or keys, heads, head_dim); lse: (heads, rows).
template <int kHeadDim>
void forward(const void* q, const void* k, const void* v, void* out, float* lse, int rows, int keys,
             int heads, int causal) {
  using Sizes = FwdTiles<kHeadDim, kHeadDim>;
  FwdParams p;
  p.q = q;
  p.k = k;
  p.v = v;
  p.out = out;
  p.lse = lse;
  p.q_stride = p.out_stride = {int64_t(rows) * heads * kHeadDim, heads * kHeadDim, kHeadDim};
  p.k_stride = p.v_stride = {int64_t(keys) * heads * kHeadDim, heads * kHeadDim, kHeadDim};
  p.lse_batch_stride = heads * rows;
  p.lse_head_stride = rows;
  p.batch = 1;
  p.num_heads_q = p.num_heads_kv = heads;
  p.head_dim = p.head_dim_v = kHeadDim;
  p.seqlen_q = rows;
  p.seqlen_kv = keys;
  p.total_q = rows;
  p.total_kv = keys;
  p.softmax_scale = 1.0f;
  if (causal) p.window_right = 0;
  launch_tile<FwdTile<kHeadDim, kHeadDim, Sizes::kStages, Sizes::kEmulated>, DType::kBFloat16>(
      p, nullptr);
  check_cuda(cudaDeviceSynchronize(), "forward");
}

}  // namespace
}  // namespace flash_cuda::sm100

TEST_EXPORT const char* flash_cuda_test_forward(const void* q, const void* k, const void* v,
                                                void* out, float* lse, int rows, int keys,
                                                int heads, int causal) {
  return guarded(
      [&] { flash_cuda::sm100::forward<HEAD_DIM>(q, k, v, out, lse, rows, keys, heads, causal); });
}
