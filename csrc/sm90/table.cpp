// The kernels of this folder, as dispatch sees them.
#include "common/kernel_table.h"
#include "sm90/fwd.h"

namespace flash_cuda::sm90 {
namespace {

size_t no_workspace(const FwdParams&) { return 0; }

template <DType kDType, int kHeadDim, int kHeadDimV>
constexpr FwdKernel fwd_row(const char* name, int block_q, int block_kv, int threads) {
  return {name,    90,      kDType,     kHeadDim,     kHeadDimV,
          block_q, block_kv, threads, refuse_fwd, no_workspace, launch_fwd<kDType, kHeadDim, kHeadDimV>};
}

template <DType kDType>
constexpr FwdKernel kHdim64 = fwd_row<kDType, 64, 64>("sm90_fwd_hdim64", 192, 128, 512);
template <DType kDType>
constexpr FwdKernel kHdim128 = fwd_row<kDType, 128, 128>("sm90_fwd_hdim128", 128, 128, 384);

constexpr FwdKernel kFwd[] = {
    kHdim64<DType::kBFloat16>,
    kHdim64<DType::kFloat16>,
    kHdim128<DType::kBFloat16>,
    kHdim128<DType::kFloat16>,
};

}  // namespace

const KernelTable& kernel_table() {
  static const KernelTable table = [] {
    KernelTable t;
    t.fwd = kFwd;
    t.num_fwd = sizeof(kFwd) / sizeof(kFwd[0]);
    return t;
  }();
  return table;
}

}  // namespace flash_cuda::sm90
