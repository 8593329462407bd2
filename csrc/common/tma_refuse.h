// Forward calls that kernels with tensor maps leave to another folder, and why.
#pragma once

#include "common/params.h"
#include "common/tma_rows.h"

namespace flash_cuda {

inline const char* refuse_tma_layout(const FwdParams& p) {
  const FwdSources t = FwdSources::make(p);
  if (!map_serves(t.q, t.packed_q) || !map_serves(t.k, t.packed_kv) ||
      !map_serves(t.v, t.packed_kv) || !map_serves(t.out, t.packed_q)) {
    return "q, k and v need 16-byte aligned addresses and strides without broadcasting for the "
           "copy engine";
  }
  const bool counts =
      (!p.seqused_q || t.packed_q || rows_count_through(t.q)) &&
      (!p.seqused_k || t.packed_kv || (rows_count_through(t.k) && rows_count_through(t.v)));
  if (!counts) return "used lengths with a batch stride that is no multiple of the row stride";
  // Both are found through one count of rows.
  if (p.seqused_k && !t.packed_kv && p.batch > 1 &&
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
