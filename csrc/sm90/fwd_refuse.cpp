// Calls that the Hopper forward leaves to another folder, and why.
#include "common/tma_refuse.h"
#include "sm90/fwd.h"
#include "sm90/narrow_rows.h"

namespace flash_cuda::sm90 {

const char* refuse_fwd(const FwdParams& p) {
  if (is_many_narrow(p, 160)) return "many short rows of up to 32 columns are served by sm80";
  return refuse_tma_fwd(p);
}

}  // namespace flash_cuda::sm90
