// Calls that the Blackwell forward leaves to another folder, and why.
#include "common/tma_refuse.h"
#include "sm100/fwd.h"

namespace flash_cuda::sm100 {

const char* refuse_fwd(const FwdParams& p) { return refuse_tma_fwd(p); }

}  // namespace flash_cuda::sm100
