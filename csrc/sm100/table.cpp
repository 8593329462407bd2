// The kernels of this folder, as dispatch sees them.
#include "common/kernel_table.h"
#include "sm100/bwd.h"
#include "sm100/fwd.h"

namespace flash_cuda::sm100 {
namespace {

size_t no_workspace(const FwdParams&) { return 0; }

template <DType kDType, int kHeadDim, int kHeadDimV>
constexpr FwdKernel fwd_row(const char* name, int block_q, int threads) {
  return {name,
          100,
          kDType,
          kHeadDim,
          kHeadDimV,
          block_q,
          128,
          threads,
          refuse_fwd,
          no_workspace,
          launch_fwd<kDType, kHeadDim, kHeadDimV>};
}

constexpr FwdKernel kFwd[] = {
    fwd_row<DType::kBFloat16, 64, 64>("sm100_fwd_hdim64", 256, 512),
    fwd_row<DType::kFloat16, 64, 64>("sm100_fwd_hdim64", 256, 512),
    fwd_row<DType::kBFloat16, 96, 96>("sm100_fwd_hdim96", 256, 512),
    fwd_row<DType::kFloat16, 96, 96>("sm100_fwd_hdim96", 256, 512),
    fwd_row<DType::kBFloat16, 128, 128>("sm100_fwd_hdim128", 256, 512),
    fwd_row<DType::kFloat16, 128, 128>("sm100_fwd_hdim128", 256, 512),
    fwd_row<DType::kBFloat16, 192, 128>("sm100_fwd_hdim192_128", 256, 512),
    fwd_row<DType::kFloat16, 192, 128>("sm100_fwd_hdim192_128", 256, 512),
    fwd_row<DType::kBFloat16, 256, 256>("sm100_fwd_hdim256", 128, 384),
    fwd_row<DType::kFloat16, 256, 256>("sm100_fwd_hdim256", 128, 384),
};

template <DType kDType, int kHeadDim, int kHeadDimV>
constexpr BwdKernel bwd_row(const char* name) {
  return {name,
          100,
          kDType,
          kHeadDim,
          kHeadDimV,
          128,
          128,
          512,
          refuse_bwd,
          bwd_workspace_bytes<kHeadDim>,
          launch_bwd<kDType, kHeadDim, kHeadDimV>};
}

template <DType kDType>
constexpr BwdKernel kPairHdim128 = {"sm100_bwd_pair_hdim128",
                                    100,
                                    kDType,
                                    128,
                                    128,
                                    128,
                                    256,
                                    512,
                                    refuse_bwd_pair,
                                    bwd_workspace_bytes<128>,
                                    launch_bwd_pair<kDType>};

template <DType kDType>
constexpr BwdKernel kWideHdim256 = {"sm100_bwd_hdim256",
                                    100,
                                    kDType,
                                    256,
                                    256,
                                    128,
                                    128,
                                    320,
                                    refuse_bwd,
                                    bwd_wide_workspace_bytes,
                                    launch_bwd_wide<kDType>};

constexpr BwdKernel kBwd[] = {
    bwd_row<DType::kBFloat16, 64, 64>("sm100_bwd_hdim64"),
    bwd_row<DType::kFloat16, 64, 64>("sm100_bwd_hdim64"),
    bwd_row<DType::kBFloat16, 96, 96>("sm100_bwd_hdim96"),
    bwd_row<DType::kFloat16, 96, 96>("sm100_bwd_hdim96"),
    kPairHdim128<DType::kBFloat16>,
    kPairHdim128<DType::kFloat16>,
    bwd_row<DType::kBFloat16, 128, 128>("sm100_bwd_hdim128"),
    bwd_row<DType::kFloat16, 128, 128>("sm100_bwd_hdim128"),
    bwd_row<DType::kBFloat16, 192, 128>("sm100_bwd_hdim192_128"),
    bwd_row<DType::kFloat16, 192, 128>("sm100_bwd_hdim192_128"),
    kWideHdim256<DType::kBFloat16>,
    kWideHdim256<DType::kFloat16>,
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

}  // namespace flash_cuda::sm100
