#include "api/fill_params.h"

#include <cmath>

#include "api/calls.h"
#include "common/host_device.h"

namespace flash_cuda {

namespace {

int window_end(int64_t end) {
  return end < 0 ? kUnbounded : static_cast<int>(min_of(end, int64_t{kUnbounded}));
}

// 0 for a dimension that is broadcast.
int64_t broadcast_stride(const TensorInfo& t, int dim) {
  return t.size(dim) == 1 ? 0 : t.stride(dim);
}

Stride contiguous_stride(bool packed, int64_t rows, int64_t heads, int64_t head_dim) {
  return {packed ? 0 : rows * heads * head_dim, heads * head_dim, head_dim};
}

void fill_sizes(const FwdArgs& a, const Sizes& s, FwdParams& p) {
  p.batch = static_cast<int>(s.batch);
  p.num_heads_q = static_cast<int>(s.num_heads_q);
  p.num_heads_kv = static_cast<int>(s.num_heads_kv);
  p.head_dim = static_cast<int>(s.head_dim);
  p.head_dim_v = static_cast<int>(s.head_dim_v);
  p.seqlen_q = static_cast<int>(s.seqlen_q);
  p.seqlen_kv = static_cast<int>(s.seqlen_kv);
  p.total_q = s.total_q;
  p.total_kv = s.total_kv;
  p.page_size = static_cast<int>(s.page_size);
  p.num_pages = static_cast<int>(s.num_pages);
  const bool packed = a.cu_seqlens_q.given();
  // dense: q has as many rows as seqlen_q says; packed: lse is (heads, total_q)
  p.out_stride = contiguous_stride(packed, s.seqlen_q, s.num_heads_q, s.head_dim_v);
  p.lse_head_stride = packed ? s.total_q : s.seqlen_q;
  p.lse_batch_stride = packed ? 0 : s.num_heads_q * s.seqlen_q;
}

void fill_score_tensors(const FwdArgs& a, FwdParams& p) {
  if (a.alibi_slopes.given()) {
    p.alibi_slopes = a.alibi_slopes.as<float>();
    p.alibi_batch_stride = a.alibi_slopes.ndim == 2 ? a.alibi_slopes.stride(0) : 0;
  }
  if (a.bias.given()) {
    p.bias = a.bias.data;
    p.bias_dtype = kernel_dtype(a.bias);
    p.bias_batch_stride = broadcast_stride(a.bias, 0);
    p.bias_head_stride = broadcast_stride(a.bias, 1);
    p.bias_row_stride = broadcast_stride(a.bias, 2);
    p.bias_col_stride = a.bias.stride(3);
  }
  if (a.sink.given()) p.sink = a.sink.as<float>();
  if (a.qv.given()) {
    p.qv = a.qv.data;
    p.qv_stride = stride_of(a.qv);
  }
  const auto descale = [](const TensorInfo& t, const float*& data, int64_t& batch, int64_t& head) {
    if (!t.given()) return;
    data = t.as<float>();
    batch = t.stride(0);
    head = t.stride(1);
  };
  descale(a.q_descale, p.q_descale, p.q_descale_batch_stride, p.q_descale_head_stride);
  descale(a.k_descale, p.k_descale, p.k_descale_batch_stride, p.k_descale_head_stride);
  descale(a.v_descale, p.v_descale, p.v_descale_batch_stride, p.v_descale_head_stride);
}

}  // namespace

Stride stride_of(const TensorInfo& t) {
  return {t.ndim == 4 ? t.stride(0) : 0, t.stride(-3), t.stride(-2)};
}

FwdParams fill_fwd_params(const FwdArgs& a, const Sizes& s, const DeviceInfo& device) {
  FwdParams p;
  p.q = a.q.data;
  p.k = a.k.data;
  p.v = a.v.data;
  p.q_stride = stride_of(a.q);
  p.k_stride = stride_of(a.k);
  p.v_stride = stride_of(a.v);
  p.dtype = kernel_dtype(a.q);
  p.out_dtype = p.dtype == DType::kFloat8E4M3 ? DType::kBFloat16 : p.dtype;
  fill_sizes(a, s, p);

  const auto ints = [](const TensorInfo& t) { return t.given() ? t.as<int>() : nullptr; };
  p.cu_seqlens_q = ints(a.cu_seqlens_q);
  p.cu_seqlens_k = ints(a.cu_seqlens_k);
  p.seqused_q = ints(a.seqused_q);
  p.seqused_k = ints(a.seqused_k);
  p.leftpad_k = ints(a.leftpad_k);
  p.cache_batch_idx = ints(a.cache_batch_idx);
  p.block_table = ints(a.block_table);
  if (a.block_table.given()) p.block_table_stride = a.block_table.stride(0);

  const int64_t scaled_dim = s.head_dim + (a.qv.given() ? s.head_dim_v : 0);
  p.softmax_scale = static_cast<float>(
      a.has_softmax_scale ? a.softmax_scale : 1.0 / std::sqrt(static_cast<double>(scaled_dim)));
  p.softcap = static_cast<float>(a.softcap);
  p.window_left = window_end(a.window_left);
  p.window_right = window_end(a.window_right);
  p.attention_chunk = static_cast<int>(min_of(a.attention_chunk, int64_t{kUnbounded}));
  p.top_left = a.top_left;
  p.strict = a.strict;
  fill_score_tensors(a, p);
  p.dropout_p = static_cast<float>(a.dropout_p);
  if (a.dropout_p > 0.0) p.rng_state = a.rng_state.as<int64_t>();

  p.num_sms = device.num_sms;
  p.compute_capability = device.compute_capability;
  p.max_smem_per_block = device.max_smem_per_block;
  return p;
}

BwdParams fill_bwd_params(const BwdArgs& b, const Sizes& s, const DeviceInfo& device) {
  const FwdArgs& a = b.fwd;
  BwdParams p;
  p.fwd = fill_fwd_params(a, s, device);
  const bool packed = a.cu_seqlens_q.given();
  p.fwd.out = const_cast<void*>(b.out.data);
  p.fwd.lse = const_cast<float*>(b.lse.as<float>());
  p.out_stride = stride_of(b.out);
  p.fwd.out_stride = p.out_stride;
  p.fwd.lse_batch_stride = packed ? 0 : b.lse.stride(0);
  p.fwd.lse_head_stride = b.lse.stride(-2);
  p.dout = b.dout.data;
  p.dout_stride = stride_of(b.dout);
  if (b.dlse.given()) {
    p.dlse = b.dlse.as<float>();
    p.dlse_batch_stride = packed ? 0 : b.dlse.stride(0);
    p.dlse_head_stride = b.dlse.stride(-2);
  }
  p.dq_stride = contiguous_stride(packed, s.seqlen_q, s.num_heads_q, s.head_dim);
  const bool packed_kv = a.cu_seqlens_k.given();
  p.dk_stride = contiguous_stride(packed_kv, s.seqlen_kv, s.num_heads_kv, s.head_dim);
  p.dv_stride = contiguous_stride(packed_kv, s.seqlen_kv, s.num_heads_kv, s.head_dim_v);
  if (a.bias.given()) {
    const int64_t row = a.bias.size(3), head = a.bias.size(2) * row, batch = a.bias.size(1) * head;
    p.dbias_batch_stride = a.bias.size(0) == 1 ? 0 : batch;
    p.dbias_head_stride = a.bias.size(1) == 1 ? 0 : head;
    p.dbias_row_stride = a.bias.size(2) == 1 ? 0 : row;
    p.dbias_col_stride = 1;
  }
  p.deterministic = b.deterministic;
  p.wanted = static_cast<int>(b.wanted);
  return p;
}

}  // namespace flash_cuda
