#include "sm80/table.h"

#include "common/decode_passes.h"
#include "sm80/bwd.h"
#include "sm80/bwd_tile.h"
#include "sm80/decode.h"
#include "sm80/decode_tile.h"
#include "sm80/fwd.h"
#include "sm80/fwd_tile.h"

namespace flash_cuda::sm80 {
namespace {

const char* refuse_fwd(const FwdParams& p) {
  if (p.qv) return "qv is served by the split-KV kernel";
  return nullptr;
}

const char* refuse_bwd(const BwdParams& p) {
  const FwdParams& f = p.fwd;
  if (f.qv) return "qv has no backward";
  if (f.block_table || f.cache_batch_idx || f.leftpad_k) {
    return "block_table, cache_batch_idx and leftpad_k have no backward";
  }
  return nullptr;
}

const char* serve_all(const FwdParams&) { return nullptr; }

size_t no_workspace(const FwdParams&) { return 0; }

template <DType kDType, int kHeadDim, int kHeadDimV>
constexpr FwdKernel fwd_row(const char* name) {
  using Tile = FwdTile<kHeadDim, kHeadDimV, SmemClass::k163, Variant::kPlain>;
  return {name,
          80,
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

template <DType kDType, int kHeadDim, int kHeadDimV>
constexpr FwdKernel decode_row(const char* name) {
  using Tile = DecodeTile<kHeadDim, kHeadDimV, true, 4>;
  return {name,
          80,
          kDType,
          kHeadDim,
          kHeadDimV,
          Tile::kBlockQ,
          Tile::kBlockKV,
          Tile::kThreads,
          serve_all,
          decode_workspace_bytes<kHeadDim, kHeadDimV>,
          launch_decode<kDType, kHeadDim, kHeadDimV>,
          /*deals_out=*/true};
}

template <DType kDType, int kHeadDim, int kHeadDimV>
constexpr BwdKernel bwd_row(const char* name) {
  using Tile = BwdTile<kHeadDim, kHeadDimV, SmemClass::k163, Variant::kPlain>;
  return {name,
          80,
          kDType,
          kHeadDim,
          kHeadDimV,
          Tile::kBlockQ,
          Tile::kBlockKV,
          Tile::kThreads,
          refuse_bwd,
          bwd_workspace_bytes<kHeadDim, kHeadDimV>,
          launch_bwd<kDType, kHeadDim, kHeadDimV>};
}

constexpr DType kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

const FwdKernel kFwd[] = {
    fwd_row<kF16, 32, 32>("sm80_fwd_hdim32"),
    fwd_row<kBF16, 32, 32>("sm80_fwd_hdim32"),
    fwd_row<kF16, 64, 64>("sm80_fwd_hdim64"),
    fwd_row<kBF16, 64, 64>("sm80_fwd_hdim64"),
    fwd_row<kF16, 96, 96>("sm80_fwd_hdim96"),
    fwd_row<kBF16, 96, 96>("sm80_fwd_hdim96"),
    fwd_row<kF16, 128, 128>("sm80_fwd_hdim128"),
    fwd_row<kBF16, 128, 128>("sm80_fwd_hdim128"),
    fwd_row<kF16, 192, 128>("sm80_fwd_hdim192_128"),
    fwd_row<kBF16, 192, 128>("sm80_fwd_hdim192_128"),
    fwd_row<kF16, 192, 192>("sm80_fwd_hdim192"),
    fwd_row<kBF16, 192, 192>("sm80_fwd_hdim192"),
    fwd_row<kF16, 256, 256>("sm80_fwd_hdim256"),
    fwd_row<kBF16, 256, 256>("sm80_fwd_hdim256"),
};

const FwdKernel kDecode[] = {
    decode_row<kF16, 64, 64>("sm80_decode_hdim64"),
    decode_row<kBF16, 64, 64>("sm80_decode_hdim64"),
    decode_row<kF16, 128, 128>("sm80_decode_hdim128"),
    decode_row<kBF16, 128, 128>("sm80_decode_hdim128"),
    decode_row<kF16, 256, 256>("sm80_decode_hdim256"),
    decode_row<kBF16, 256, 256>("sm80_decode_hdim256"),
};

const BwdKernel kBwd[] = {
    bwd_row<kF16, 32, 32>("sm80_bwd_hdim32"),
    bwd_row<kBF16, 32, 32>("sm80_bwd_hdim32"),
    bwd_row<kF16, 64, 64>("sm80_bwd_hdim64"),
    bwd_row<kBF16, 64, 64>("sm80_bwd_hdim64"),
    bwd_row<kF16, 96, 96>("sm80_bwd_hdim96"),
    bwd_row<kBF16, 96, 96>("sm80_bwd_hdim96"),
    bwd_row<kF16, 128, 128>("sm80_bwd_hdim128"),
    bwd_row<kBF16, 128, 128>("sm80_bwd_hdim128"),
    bwd_row<kF16, 192, 128>("sm80_bwd_hdim192_128"),
    bwd_row<kBF16, 192, 128>("sm80_bwd_hdim192_128"),
    bwd_row<kF16, 192, 192>("sm80_bwd_hdim192"),
    bwd_row<kBF16, 192, 192>("sm80_bwd_hdim192"),
    bwd_row<kF16, 256, 256>("sm80_bwd_hdim256"),
    bwd_row<kBF16, 256, 256>("sm80_bwd_hdim256"),
};

}  // namespace

const KernelTable& kernel_table() {
  static const KernelTable table = [] {
    KernelTable t;
    t.fwd = kFwd;
    t.num_fwd = sizeof kFwd / sizeof *kFwd;
    t.decode = kDecode;
    t.num_decode = sizeof kDecode / sizeof *kDecode;
    t.combine = launch_combine;
    t.kv_append = launch_kv_append;
    t.bwd = kBwd;
    t.num_bwd = sizeof kBwd / sizeof *kBwd;
    return t;
  }();
  return table;
}

}  // namespace flash_cuda::sm80
