// Forward calls that kernels with tensor maps leave to another folder, and why.
#pragma once

#include "common/params.h"
#include "common/tma_rows.h"

namespace flash_cuda {

inline const char* refuse_tma_layout(const FwdParams& p) {
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv;
  const MapSource q{p.q, p.q_stride, p.head_dim, rows_q, p.num_heads_q, p.batch};
  const MapSource k{p.k, p.k_stride, p.head_dim, rows_kv, p.num_heads_kv, p.batch};
  const MapSource v{p.v, p.v_stride, p.head_dim_v, rows_kv, p.num_heads_kv, p.batch};
  const MapSource out{p.out, p.out_stride, p.head_dim_v, rows_q, p.num_heads_q, p.batch};
  if (!map_serves(q, packed_q) || !map_serves(k, packed_kv) || !map_serves(v, packed_kv) ||
      !map_serves(out, packed_q)) {
    return "q, k and v need 16-byte aligned addresses and strides without broadcasting for the "
           "copy engine";
  }
  const bool counts =
      (!p.seqused_q || packed_q || rows_count_through(q)) &&
      (!p.seqused_k || packed_kv || (rows_count_through(k) && rows_count_through(v)));
  if (!counts) return "used lengths with a batch stride that is no multiple of the row stride";
  // Both are found through one count of rows.
  if (p.seqused_k && !packed_kv && p.batch > 1 &&
      p.k_stride.batch / p.k_stride.row != p.v_stride.batch / p.v_stride.row) {
    return "used lengths with different numbers of rows between the batches of k and v";
  }
  // Rows, their sums and tile numbers are 32-bit on the device.
  constexpr int64_t kMaxRows = int64_t(1) << 29;
  if (p.total_q > kMaxRows || p.total_kv > kMaxRows) return "more than 2^29 rows";
  return nullptr;
}

// Null: served.
inline const char* refuse_tma_fwd(const FwdParams& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "dtype";
  if (p.dropout_p > 0.0f) return "dropout is served by sm80";
  if (p.qv) return "qv is served by sm80";
  if (p.block_table) return "paged caches are served by sm80";
  if (p.cache_batch_idx) return "cache_batch_idx is served by sm80";
  if (p.leftpad_k) return "leftpad_k is served by sm80";
  if (p.num_splits > 1 || p.out_partial) return "split-KV is served by the decode kernels";
  return refuse_tma_layout(p);
}

}  // namespace flash_cuda
