// Calls that the Hopper backward for wide heads leaves to another folder, and
// why.
#include "sm90/bwd.h"
#include "sm90/bwd_wide.h"

namespace flash_cuda::sm90 {

const char* refuse_bwd_wide(const BwdParams& params) {
  if (const char* why = refuse_bwd(params)) return why;
  const FwdParams& p = params.fwd;
  if (p.bias) return "bias with a head_dim above 128 is served by sm80";
  if (p.cu_seqlens_q || p.cu_seqlens_k || p.seqused_q || p.seqused_k) {
    return "packed sequences and used lengths with a head_dim above 128 are "
           "served by sm80";
  }
  return nullptr;
}

}  // namespace flash_cuda::sm90
