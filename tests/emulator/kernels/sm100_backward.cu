// The Blackwell backward kernel by itself, one element type and variant, for planted mistakes.
// The test puts copies of csrc/sm100's headers, changed, beside a copy of this file.
#ifdef WIDE
#include "bwd_wide_launch.cuh"
#else
#include "bwd_launch.cuh"
#endif
#include "test_api.h"

namespace flash_cuda::sm100 {
namespace {

// q, out, dout, dq: (rows, heads, head dim of Q or V); k, v, dk, dv: (keys, 1, ...); lse:
// (heads, rows).
struct Tensors {
  const void *q, *k, *v, *out, *dout;
  float* lse;
  void *dq, *dk, *dv;
};

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
#if defined(WIDE)
size_t workspace_bytes(const BwdParams& params) {
  size_t bytes;
  bwd_wide_workspace(params, &bytes);
  return bytes;
}
void launch(const BwdParams& params) { launch_bwd_wide<DType::kBFloat16>(params, nullptr); }
#else
size_t workspace_bytes(const BwdParams& params) { return bwd_workspace_bytes<kHeadDim>(params); }
#if defined(PAIR)
void launch(const BwdParams& params) {
  launch_bwd_tile<BwdPairTile<false>, DType::kBFloat16>(params, nullptr);
}
#else
void launch(const BwdParams& params) {
  using Stages = BwdStages<kHeadDim, kHeadDimV>;
  launch_bwd_tile<BwdTile<kHeadDim, kHeadDimV, Stages::kQ, Stages::kDout, false>, DType::kBFloat16>(
      params, nullptr);
}
#endif
#endif

void backward(const Tensors& t, int rows, int keys, int heads, int deterministic) {
  BwdParams params;
  FwdParams& p = params.fwd;
  const auto strides = [](int length, int num_heads, int head_dim) {
    return Stride{int64_t(length) * num_heads * head_dim, int64_t(num_heads) * head_dim, head_dim};
  };
  p.q = t.q;
  p.k = t.k;
  p.v = t.v;
  p.out = const_cast<void*>(t.out);
  p.lse = t.lse;
  params.dout = t.dout;
  params.dq = t.dq;
  params.dk = t.dk;
  params.dv = t.dv;
  p.q_stride = params.dq_stride = strides(rows, heads, kHeadDim);
  params.out_stride = params.dout_stride = strides(rows, heads, kHeadDimV);
  p.k_stride = params.dk_stride = strides(keys, 1, kHeadDim);
  p.v_stride = params.dv_stride = strides(keys, 1, kHeadDimV);
  p.lse_batch_stride = heads * rows;
  p.lse_head_stride = rows;
  p.dtype = DType::kBFloat16;
  p.batch = 1;
  p.num_heads_q = heads;
  p.num_heads_kv = 1;
  p.head_dim = kHeadDim;
  p.head_dim_v = kHeadDimV;
  p.seqlen_q = p.total_q = rows;
  p.seqlen_kv = p.total_kv = keys;
  p.softmax_scale = 0.125f;
  params.deterministic = deterministic;
  check_cuda(cudaMalloc(&params.workspace, workspace_bytes(params)), "cudaMalloc");
  launch(params);
  check_cuda(cudaDeviceSynchronize(), "backward");
  check_cuda(cudaFree(params.workspace), "cudaFree");
}

}  // namespace
}  // namespace flash_cuda::sm100

TEST_EXPORT const char* flash_cuda_test_backward(const void* q, const void* k, const void* v,
                                                 const void* out, const void* dout, float* lse,
                                                 void* dq, void* dk, void* dv, int rows, int keys,
                                                 int heads, int deterministic) {
  return guarded([&] {
    flash_cuda::sm100::backward({q, k, v, out, dout, lse, dq, dk, dv}, rows, keys, heads,
                                deterministic);
  });
}
