// The Blackwell kernels of one head dim as C functions, for test_sm100_on_hopper.py.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "sm100/bwd_launch.cuh"
#include "sm100/fwd_launch.cuh"
#ifdef WIDE
#include "sm100/bwd_wide_launch.cuh"
#endif

using flash_cuda::BwdParams;
using flash_cuda::DType;
using flash_cuda::FwdParams;
using flash_cuda::Stride;

// ctypes structures of the test, field by field.
struct Array {
  void* data;
  int64_t batch, row, head;  // strides in elements
  Stride stride() const { return {batch, row, head}; }
};
struct Bias {
  void* data;
  int64_t batch, head, row, col;  // strides, 0 where it is repeated
};
struct Call {
  Bias bias, dbias;
  Array q, k, v, out, dout, dq, dk, dv;
  float *lse, *dsink;
  const float *dlse, *alibi_slopes, *sink;
  const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
  int64_t alibi_batch_stride, total_q, total_kv;
  int is_bf16, batch, seqlen_q, seqlen_kv, heads, heads_kv, head_dim, head_dim_v;
  int window_left, window_right, chunk, top_left, strict, deterministic, wanted, bias_is_f32;
  float softmax_scale, softcap;
};

namespace {

FwdParams forward_params(const Call& c) {
  FwdParams p;
  p.q = c.q.data;
  p.k = c.k.data;
  p.v = c.v.data;
  p.out = c.out.data;
  p.lse = c.lse;
  p.q_stride = c.q.stride();
  p.k_stride = c.k.stride();
  p.v_stride = c.v.stride();
  p.out_stride = c.out.stride();
  p.lse_batch_stride = c.cu_seqlens_q ? 0 : int64_t(c.heads) * c.seqlen_q;
  p.lse_head_stride = c.cu_seqlens_q ? c.total_q : c.seqlen_q;
  p.dtype = c.is_bf16 ? DType::kBFloat16 : DType::kFloat16;
  p.batch = c.batch;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_kv = c.seqlen_kv;
  p.total_q = c.total_q;
  p.total_kv = c.total_kv;
  p.num_heads_q = c.heads;
  p.num_heads_kv = c.heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.cu_seqlens_q = c.cu_seqlens_q;
  p.cu_seqlens_k = c.cu_seqlens_k;
  p.seqused_q = c.seqused_q;
  p.seqused_k = c.seqused_k;
  p.softmax_scale = c.softmax_scale;
  p.softcap = c.softcap;
  if (c.window_left >= 0) p.window_left = c.window_left;
  if (c.window_right >= 0) p.window_right = c.window_right;
  p.attention_chunk = c.chunk;
  p.top_left = c.top_left;
  p.strict = c.strict;
  p.alibi_slopes = c.alibi_slopes;
  p.alibi_batch_stride = c.alibi_batch_stride;
  p.sink = c.sink;
  p.bias = c.bias.data;
  p.bias_dtype = c.bias_is_f32 ? DType::kFloat32 : p.dtype;
  p.bias_batch_stride = c.bias.batch;
  p.bias_head_stride = c.bias.head;
  p.bias_row_stride = c.bias.row;
  p.bias_col_stride = c.bias.col;
  p.compute_capability = 100;
  p.max_smem_per_block = 232448;
  cudaDeviceGetAttribute(&p.num_sms, cudaDevAttrMultiProcessorCount, 0);
  return p;
}

// Null, or what went wrong.
template <class Fn>
const char* guarded(Fn fn) {
  static std::string message;
  try {
    fn();
    const cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) return nullptr;
    message = std::string("CUDA: ") + cudaGetErrorString(error);
  } catch (const std::exception& e) {
    message = e.what();
  }
  return message.c_str();
}

// The backward by single thread blocks, by pairs of them, or in two passes.
using namespace flash_cuda::sm100;
#if defined(WIDE)
const char* refuse(const BwdParams& b) { return refuse_bwd(b); }
size_t workspace_bytes(const BwdParams& b) {
  size_t bytes;
  bwd_wide_workspace(b, &bytes);
  return bytes;
}
template <DType kDType>
void launch(const BwdParams& b) {
  launch_bwd_wide<kDType>(b, nullptr);
}
#else
size_t workspace_bytes(const BwdParams& b) { return bwd_workspace_bytes<HEAD_DIM>(b); }
#if defined(PAIRS)
const char* refuse(const BwdParams& b) { return refuse_bwd_pair(b); }
template <DType kDType>
void launch(const BwdParams& b) {
  launch_bwd_pair<kDType>(b, nullptr);
}
#else
const char* refuse(const BwdParams& b) { return refuse_bwd(b); }
template <DType kDType>
void launch(const BwdParams& b) {
  launch_bwd<kDType, HEAD_DIM, HEAD_DIM_V>(b, nullptr);
}
#endif
#endif

}  // namespace

extern "C" const char* shadow_forward(const Call* c) {
  return guarded([&] {
    const FwdParams p = forward_params(*c);
    if (const char* why = flash_cuda::sm100::refuse_fwd(p)) throw std::runtime_error(why);
    if (c->is_bf16) {
      flash_cuda::sm100::launch_fwd<DType::kBFloat16, HEAD_DIM, HEAD_DIM_V>(p, nullptr);
    } else {
      flash_cuda::sm100::launch_fwd<DType::kFloat16, HEAD_DIM, HEAD_DIM_V>(p, nullptr);
    }
  });
}

extern "C" const char* shadow_backward(const Call* c) {
  return guarded([&] {
    BwdParams b;
    b.fwd = forward_params(*c);
    b.dout = c->dout.data;
    b.dout_stride = c->dout.stride();
    b.out_stride = c->out.stride();
    b.dlse = c->dlse;
    b.dlse_batch_stride = b.fwd.lse_batch_stride;
    b.dlse_head_stride = b.fwd.lse_head_stride;
    b.dq = c->dq.data;
    b.dk = c->dk.data;
    b.dv = c->dv.data;
    b.dq_stride = c->dq.stride();
    b.dk_stride = c->dk.stride();
    b.dv_stride = c->dv.stride();
    b.dsink = c->dsink;
    b.dbias = static_cast<float*>(c->dbias.data);
    b.dbias_batch_stride = c->dbias.batch;
    b.dbias_head_stride = c->dbias.head;
    b.dbias_row_stride = c->dbias.row;
    b.dbias_col_stride = c->dbias.col;
    b.deterministic = c->deterministic;
    b.wanted = c->wanted;
    if (const char* why = refuse(b)) throw std::runtime_error(why);
    const size_t bytes = workspace_bytes(b);
    flash_cuda::check_cuda(cudaMalloc(&b.workspace, bytes), "cudaMalloc");
    flash_cuda::check_cuda(cudaMemset(b.workspace, 0xff, bytes), "cudaMemset");  // NaN
    if (c->is_bf16) {
      launch<DType::kBFloat16>(b);
    } else {
      launch<DType::kFloat16>(b);
    }
    flash_cuda::check_cuda(cudaDeviceSynchronize(), "backward");
    flash_cuda::check_cuda(cudaFree(b.workspace), "cudaFree");
  });
}
