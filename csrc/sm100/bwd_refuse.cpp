// Calls that the Blackwell backward leaves to another folder, and why.
#include "common/tma_refuse.h"
#include "sm100/bwd.h"

namespace flash_cuda::sm100 {
namespace {

const char* refuse_layout(const BwdParams& params) {
  FwdParams p = params.fwd;
  p.out_stride = params.out_stride;
  if (const char* why = refuse_tma_layout(p)) return why;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv;
  const auto like_q = [&](const void* base, const Stride& stride) {
    return MapSource{base, stride, p.head_dim, rows_q, p.num_heads_q, p.batch};
  };
  const auto like_kv = [&](const void* base, const Stride& stride) {
    return MapSource{base, stride, p.head_dim, rows_kv, p.num_heads_kv, p.batch};
  };
  const MapSource dout = like_q(params.dout, params.dout_stride);
  if (!map_serves(dout, packed_q)) {
    return "dout needs 16-byte aligned addresses and strides without broadcasting for the copy "
           "engine";
  }
  if (!map_serves(like_q(params.dq, params.dq_stride), packed_q) ||
      !map_serves(like_kv(params.dk, params.dk_stride), packed_kv) ||
      !map_serves(like_kv(params.dv, params.dv_stride), packed_kv)) {
    return "dq, dk and dv need 16-byte aligned addresses and strides";
  }
  if (p.seqused_q && !packed_q && !rows_count_through(dout)) {
    return "used lengths with a batch stride of dout that is no multiple of the row stride";
  }
  return nullptr;
}

}  // namespace

const char* refuse_bwd(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "dtype";
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) {
    return "a head_dim that is no multiple of 8 is served by sm80";
  }
  if (p.dropout_p > 0.0f) return "dropout is served by sm80";
  if (p.qv) return "qv has no backward";
  if (p.block_table || p.cache_batch_idx || p.leftpad_k) {
    return "block_table, cache_batch_idx and leftpad_k have no backward";
  }
  if (p.softcap != 0.0f && (p.alibi_slopes || p.bias)) {
    return "softcap with alibi_slopes or bias is served by sm80";
  }
  return refuse_layout(params);
}

const char* refuse_bwd_pair(const BwdParams& params) {
  if (params.fwd.seqlen_kv <= 128) return "up to 128 keys are served by single thread blocks";
  return refuse_bwd(params);
}

}  // namespace flash_cuda::sm100
