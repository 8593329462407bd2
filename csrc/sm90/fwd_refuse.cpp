// Calls that the Hopper forward leaves to another folder, and why.
#include <cstdint>

#include "common/host_device.h"
#include "sm90/fwd.h"

namespace flash_cuda::sm90 {
namespace {

// The copy engine wants addresses and strides of whole 16-byte units, and no repeated rows.
// Strides below 2^33, as in common/tma_rows.h.
bool map_serves(const void* base, const Stride& stride, bool has_batch_stride, int64_t rows,
                int heads, int batch) {
  const auto fits = [](int64_t elements, int64_t count) {
    return count <= 1 || (elements > 0 && elements % 8 == 0 && elements < (int64_t(1) << 33));
  };
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && fits(stride.row, rows) &&
         fits(stride.head, heads) && (!has_batch_stride || fits(stride.batch, batch));
}

// Sequences with used lengths are found by counting rows through the batch.
bool rows_count_through(const Stride& stride, int batch) {
  return batch <= 1 || (stride.row > 0 && stride.batch % stride.row == 0);
}

const char* refuse_layout(const FwdParams& p) {
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv;
  const char* kText =
      "q, k and v need 16-byte aligned addresses and strides without broadcasting for Hopper's "
      "copy engine";
  if (!map_serves(p.q, p.q_stride, !packed_q, rows_q, p.num_heads_q, p.batch)) return kText;
  if (!map_serves(p.k, p.k_stride, !packed_kv, rows_kv, p.num_heads_kv, p.batch)) return kText;
  if (!map_serves(p.v, p.v_stride, !packed_kv, rows_kv, p.num_heads_kv, p.batch)) return kText;
  if (!map_serves(p.out, p.out_stride, !packed_q, rows_q, p.num_heads_q, p.batch)) return kText;
  const bool counts =
      (!p.seqused_q || packed_q || rows_count_through(p.q_stride, p.batch)) &&
      (!p.seqused_k || packed_kv ||
       (rows_count_through(p.k_stride, p.batch) && rows_count_through(p.v_stride, p.batch)));
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

}  // namespace

const char* refuse_fwd(const FwdParams& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "dtype";
  if (p.dropout_p > 0.0f) return "dropout is served by sm80";
  if (p.qv) return "qv is served by sm80";
  if (p.block_table) return "paged caches are served by sm80";
  if (p.cache_batch_idx) return "cache_batch_idx is served by sm80";
  if (p.leftpad_k) return "leftpad_k is served by sm80";
  if (p.num_splits > 1 || p.out_partial) return "split-KV is served by the decode kernels";
  return refuse_layout(p);
}

}  // namespace flash_cuda::sm90
