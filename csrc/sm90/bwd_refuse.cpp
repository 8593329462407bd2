// Calls that the Hopper backward leaves to another folder, and why.
#include <cstdint>

#include "common/host_device.h"
#include "sm90/bwd.h"

namespace flash_cuda::sm90 {
namespace {

// The copy engine and 16-byte accesses want whole 16-byte units, and no repeated rows.
bool in_units(const void* base, const Stride& stride, bool packed, int64_t rows, int heads,
              int batch) {
  const auto fits = [](int64_t elements, int64_t count) {
    return count <= 1 || (elements > 0 && elements % 8 == 0 && elements < (int64_t(1) << 38));
  };
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && fits(stride.row, rows) &&
         fits(stride.head, heads) && (packed || fits(stride.batch, batch));
}

const char* refuse_layout(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv;
  const auto like_q = [&](const void* base, const Stride& stride) {
    return in_units(base, stride, packed_q, rows_q, p.num_heads_q, p.batch);
  };
  const auto like_kv = [&](const void* base, const Stride& stride) {
    return in_units(base, stride, packed_kv, rows_kv, p.num_heads_kv, p.batch);
  };
  if (!like_q(p.q, p.q_stride) || !like_kv(p.k, p.k_stride) || !like_kv(p.v, p.v_stride)) {
    return "q, k and v need 16-byte aligned addresses and strides without broadcasting for "
           "Hopper's copy engine";
  }
  if (!like_q(p.out, params.out_stride) || !like_q(params.dout, params.dout_stride)) {
    return "out and dout need 16-byte aligned addresses and strides without broadcasting for "
           "Hopper's copy engine";
  }
  if (!like_q(params.dq, params.dq_stride) || !like_kv(params.dk, params.dk_stride) ||
      !like_kv(params.dv, params.dv_stride)) {
    return "dq, dk and dv need 16-byte aligned addresses and strides";
  }
  // Rows and numbers of blocks are 32-bit on the device.
  constexpr int64_t kMaxRows = int64_t(1) << 29;
  if (p.total_q > kMaxRows || p.total_kv > kMaxRows) return "more than 2^29 rows";
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
  if (p.softcap != 0.0f && p.alibi_slopes) return "softcap with alibi_slopes is served by sm80";
  if (p.softcap != 0.0f && p.bias) return "softcap with bias is served by sm80";
  // Masked scores are an infinity that the scale makes negative.
  if (!(p.softmax_scale != 0.0f)) return "a softmax_scale of 0 is served by sm80";
  return refuse_layout(params);
}

}  // namespace flash_cuda::sm90
