// Calls that the Hopper backward for wide heads leaves to another folder, and why.
#include "sm90/bwd.h"
#include "sm90/bwd_wide.h"

namespace flash_cuda::sm90 {

const char* refuse_bwd_wide(const BwdParams& params) {
  if (const char* why = refuse_bwd(params)) return why;
  const FwdParams& p = params.fwd;
  if (p.softcap != 0.0f && (p.alibi_slopes || p.bias)) {
    return "softcap with alibi_slopes or bias is served by sm80 above head dim 128";
  }
  return nullptr;
}

}  // namespace flash_cuda::sm90
