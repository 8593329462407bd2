// What the launcher adds to FwdParams: tensor maps and the order of tiles.
#pragma once

#include "common/fwd_args.h"

namespace flash_cuda::sm100 {

using FwdArgs = FwdTileArgs;

}  // namespace flash_cuda::sm100
