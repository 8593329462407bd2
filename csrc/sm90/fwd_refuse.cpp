// Calls that the Hopper forward leaves to another folder, and why.
#include "common/tma_refuse.h"
#include "sm90/fwd.h"

namespace flash_cuda::sm90 {

const char* refuse_fwd(const FwdParams& p) { return refuse_tma_fwd(p); }

}  // namespace flash_cuda::sm90
