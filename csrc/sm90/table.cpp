// The kernels of this folder, as dispatch sees them.
#include <type_traits>

#include "common/kernel_table.h"
#include "sm90/bwd.h"
#include "sm90/bwd_tile.h"
#include "sm90/bwd_wide.h"
#include "sm90/bwd_wide_tile.h"
#include "sm90/fwd.h"
#include "sm90/fwd_choice.h"

namespace flash_cuda::sm90 {
namespace {

template <int kHeadDim, int kHeadDimV>
FwdTileShape fwd_tile(const FwdParams& params) {
  return with_tile<FwdVariants<kHeadDim, kHeadDimV>>(params, [](auto tile, int) {
    using Tile = typename decltype(tile)::Type;
    return FwdTileShape{Tile::kBlockQ, Tile::kBlockKV, Tile::kThreads, Tile::kCluster};
  });
}

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
          fwd_workspace_bytes<kHeadDim, kHeadDimV>,
          launch_fwd<kDType, kHeadDim, kHeadDimV>,
          false,
          fwd_tile<kHeadDim, kHeadDimV>};
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

template <DType kDType, int kHeadDim, int kHeadDimV = kHeadDim>
constexpr BwdKernel bwd_row(const char* name) {
  constexpr bool kWide = kHeadDim > 128;
  using Tile = std::conditional_t<kWide, BwdWideTile<kHeadDim, kHeadDimV>, BwdTile<kHeadDim>>;
  BwdKernel row{};
  row.name = name;
  row.arch = 90;
  row.dtype = kDType;
  row.head_dim = kHeadDim;
  row.head_dim_v = kHeadDimV;
  row.block_q = Tile::kBlockQ;
  row.block_kv = Tile::kBlockKV;
  row.threads = Tile::kThreads;
  if constexpr (kWide) {
    row.refuse = refuse_bwd_wide;
    row.workspace_bytes = bwd_wide_workspace_bytes<kHeadDim, kHeadDimV>;
    row.launch = launch_bwd_wide<kDType, kHeadDim, kHeadDimV>;
  } else {
    row.refuse = kHeadDim == 96 ? refuse_bwd_hdim96 : refuse_bwd;
    row.workspace_bytes = bwd_workspace_bytes<kHeadDim>;
    row.launch = launch_bwd<kDType, kHeadDim>;
  }
  return row;
}

constexpr BwdKernel kBwd[] = {
    bwd_row<DType::kBFloat16, 64>("sm90_bwd_hdim64"),
    bwd_row<DType::kFloat16, 64>("sm90_bwd_hdim64"),
    bwd_row<DType::kBFloat16, 96>("sm90_bwd_hdim96"),
    bwd_row<DType::kFloat16, 96>("sm90_bwd_hdim96"),
    bwd_row<DType::kBFloat16, 128>("sm90_bwd_hdim128"),
    bwd_row<DType::kFloat16, 128>("sm90_bwd_hdim128"),
    bwd_row<DType::kBFloat16, 192, 128>("sm90_bwd_hdim192_128"),
    bwd_row<DType::kFloat16, 192, 128>("sm90_bwd_hdim192_128"),
    bwd_row<DType::kBFloat16, 192, 192>("sm90_bwd_hdim192"),
    bwd_row<DType::kFloat16, 192, 192>("sm90_bwd_hdim192"),
    bwd_row<DType::kBFloat16, 256, 256>("sm90_bwd_hdim256"),
    bwd_row<DType::kFloat16, 256, 256>("sm90_bwd_hdim256"),
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
