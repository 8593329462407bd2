// Calls that the Hopper backward leaves to another folder, and why.
#include <cstdint>

#include "common/host_device.h"
#include "sm90/bwd.h"
#include "sm90/narrow_rows.h"

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

// Whether a clipped map finds the sequences (common/tma_rows.h): in a dense tensor by counting rows
// through the batch, and with rows of less than the map's turn.
bool clips(const Stride& stride, bool packed, int batch) {
  return stride.row < (int64_t(1) << 33) &&
         (packed || batch <= 1 || (stride.row > 0 && stride.batch % stride.row == 0));
}

const char* refuse_lengths(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const auto found = [&](bool packed, bool used, const Stride& a, const Stride& b) {
    return (!packed && !used) || (clips(a, packed, p.batch) && clips(b, packed, p.batch));
  };
  if (!found(packed_q, p.seqused_q, p.q_stride, params.dout_stride) ||
      !found(packed_kv, p.seqused_k, p.k_stride, p.v_stride)) {
    return "used lengths with a batch stride that is no multiple of the row stride";
  }
  return nullptr;
}

// Rows of the bias, and of its gradient in float32, are whole 16-byte units, or there is only one.
bool bias_in_units(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  if (p.bias_row_stride == 0) return params.dbias_row_stride == 0 || p.seqlen_kv % 4 == 0;
  const int bytes = p.bias_dtype == DType::kFloat32 ? 4 : 2;
  const auto fits = [&](int64_t stride) {
    return stride >= 0 && stride * bytes % 16 == 0 && stride < (int64_t(1) << 38);
  };
  return reinterpret_cast<uintptr_t>(p.bias) % 16 == 0 && p.bias_col_stride == 1 &&
         fits(p.bias_batch_stride) && fits(p.bias_head_stride) && fits(p.bias_row_stride) &&
         p.seqlen_kv % 4 == 0;
}

}  // namespace

bool bwd_has_bias_tile(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  return p.bias ? bias_in_units(params) : p.softcap != 0.0f && p.alibi_slopes;
}

bool bwd_tiles_all_scores(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  const bool masked = p.window_left != kUnbounded || p.window_right != kUnbounded ||
                      p.attention_chunk > 0 || p.cu_seqlens_q || p.cu_seqlens_k || p.seqused_q ||
                      p.seqused_k;
  return p.bias && bwd_has_bias_tile(params) && params.dbias_row_stride != 0 && !masked;
}

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
  if (p.softcap != 0.0f && p.bias && !bias_in_units(params)) {
    return "softcap with a bias whose rows are not 16-byte aligned is served by sm80";
  }
  // Masked scores are an infinity that the scale makes negative.
  if (!(p.softmax_scale != 0.0f)) return "a softmax_scale of 0 is served by sm80";
  if (is_many_narrow(p, 64)) return "many short rows of up to 32 columns are served by sm80";
  if (const char* why = refuse_layout(params)) return why;
  return refuse_lengths(params);
}

const char* refuse_bwd_hdim96(const BwdParams& params) {
  if (const char* why = refuse_bwd(params)) return why;
  if (bwd_has_bias_tile(params)) return "tiles of bias are served by head dim 128";
  return nullptr;
}

}  // namespace flash_cuda::sm90
