// Calls that the Hopper backward for wide heads leaves to another folder, and why.
#include <cstdint>

#include "sm90/bwd.h"
#include "sm90/bwd_wide.h"

namespace flash_cuda::sm90 {
namespace {

// Whether a clipped map finds the sequences (common/tma_rows.h): in a dense tensor by counting rows
// through the batch, and with rows of less than the map's turn.
bool clips(const Stride& stride, bool packed, int batch) {
  return stride.row < (int64_t(1) << 33) &&
         (packed || batch <= 1 || (stride.row > 0 && stride.batch % stride.row == 0));
}

}  // namespace

const char* refuse_bwd_wide(const BwdParams& params) {
  if (const char* why = refuse_bwd(params)) return why;
  const FwdParams& p = params.fwd;
  if (p.softcap != 0.0f && (p.alibi_slopes || p.bias)) {
    return "softcap with alibi_slopes or bias is served by sm80 above head dim 128";
  }
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const bool q_found =
      (!packed_q && !p.seqused_q) ||
      (clips(p.q_stride, packed_q, p.batch) && clips(params.dout_stride, packed_q, p.batch));
  const bool kv_found = (!packed_kv && !p.seqused_k) || (clips(p.k_stride, packed_kv, p.batch) &&
                                                         clips(p.v_stride, packed_kv, p.batch));
  if (!q_found || !kv_found) {
    return "used lengths with a batch stride that is no multiple of the row stride";
  }
  return nullptr;
}

}  // namespace flash_cuda::sm90
