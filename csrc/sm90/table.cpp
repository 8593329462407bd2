// The kernels of this folder, as dispatch sees them.
#include "common/kernel_table.h"
#include "sm90/bwd.h"
#include "sm90/bwd_tile.h"
#include "sm90/bwd_wide.h"
#include "sm90/bwd_wide_tile.h"
#include "sm90/fwd.h"
#include "sm90/fwd_variants.h"

namespace flash_cuda::sm90 {
namespace {

size_t no_workspace(const FwdParams&) { return 0; }

// With the tile of long calls.
template <DType kDType, int kHeadDim, int kHeadDimV>
constexpr FwdKernel fwd_row(const char* name) {
  using Tile = typename FwdVariants<kHeadDim, kHeadDimV>::Long;
  return {name,
          90,
          kDType,
          kHeadDim,
          kHeadDimV,
          Tile::kBlockQ,
          Tile::kBlockKV,
          Tile::kThreads,
          refuse_fwd,
          no_workspace,
          launch_fwd<kDType, kHeadDim, kHeadDimV>};
}

constexpr FwdKernel kFwd[] = {
    fwd_row<DType::kBFloat16, 64, 64>("sm90_fwd_hdim64"),
    fwd_row<DType::kFloat16, 64, 64>("sm90_fwd_hdim64"),
    fwd_row<DType::kBFloat16, 96, 96>("sm90_fwd_hdim96"),
    fwd_row<DType::kFloat16, 96, 96>("sm90_fwd_hdim96"),
    fwd_row<DType::kBFloat16, 128, 128>("sm90_fwd_hdim128"),
    fwd_row<DType::kFloat16, 128, 128>("sm90_fwd_hdim128"),
    fwd_row<DType::kBFloat16, 192, 128>("sm90_fwd_hdim192_128"),
    fwd_row<DType::kFloat16, 192, 128>("sm90_fwd_hdim192_128"),
    fwd_row<DType::kBFloat16, 192, 192>("sm90_fwd_hdim192"),
    fwd_row<DType::kFloat16, 192, 192>("sm90_fwd_hdim192"),
    fwd_row<DType::kBFloat16, 256, 256>("sm90_fwd_hdim256"),
    fwd_row<DType::kFloat16, 256, 256>("sm90_fwd_hdim256"),
};

template <DType kDType, int kHeadDim>
constexpr BwdKernel bwd_row(const char* name) {
  using Tile = BwdTile<kHeadDim>;
  return {name,
          90,
          kDType,
          kHeadDim,
          kHeadDim,
          Tile::kBlockQ,
          Tile::kBlockKV,
          Tile::kThreads,
          kHeadDim == 96 ? refuse_bwd_hdim96 : refuse_bwd,
          bwd_workspace_bytes<kHeadDim>,
          launch_bwd<kDType, kHeadDim>};
}

template <DType kDType, int kHeadDim, int kHeadDimV>
constexpr BwdKernel bwd_wide_row(const char* name) {
  using Tile = BwdWideTile<kHeadDim, kHeadDimV>;
  return {name,
          90,
          kDType,
          kHeadDim,
          kHeadDimV,
          Tile::kBlockQ,
          Tile::kBlockKV,
          Tile::kThreads,
          refuse_bwd_wide,
          bwd_wide_workspace_bytes<kHeadDim, kHeadDimV>,
          launch_bwd_wide<kDType, kHeadDim, kHeadDimV>};
}

constexpr BwdKernel kBwd[] = {
    bwd_row<DType::kBFloat16, 64>("sm90_bwd_hdim64"),
    bwd_row<DType::kFloat16, 64>("sm90_bwd_hdim64"),
    bwd_row<DType::kBFloat16, 96>("sm90_bwd_hdim96"),
    bwd_row<DType::kFloat16, 96>("sm90_bwd_hdim96"),
    bwd_row<DType::kBFloat16, 128>("sm90_bwd_hdim128"),
    bwd_row<DType::kFloat16, 128>("sm90_bwd_hdim128"),
    bwd_wide_row<DType::kBFloat16, 192, 128>("sm90_bwd_hdim192_128"),
    bwd_wide_row<DType::kFloat16, 192, 128>("sm90_bwd_hdim192_128"),
    bwd_wide_row<DType::kBFloat16, 192, 192>("sm90_bwd_hdim192"),
    bwd_wide_row<DType::kFloat16, 192, 192>("sm90_bwd_hdim192"),
    bwd_wide_row<DType::kBFloat16, 256, 256>("sm90_bwd_hdim256"),
    bwd_wide_row<DType::kFloat16, 256, 256>("sm90_bwd_hdim256"),
};

}  // namespace

const KernelTable& kernel_table() {
  static const KernelTable table = [] {
    KernelTable t;
    t.fwd = kFwd;
    t.num_fwd = sizeof(kFwd) / sizeof(kFwd[0]);
    t.bwd = kBwd;
    t.num_bwd = sizeof(kBwd) / sizeof(kBwd[0]);
    return t;
  }();
  return table;
}

}  // namespace flash_cuda::sm90
