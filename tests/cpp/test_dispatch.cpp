// Selection, override and call preparation over made-up tables.
#include "api/dispatch.h"

#include <cstring>

#include "api/calls.h"
#include "api/check.h"
#include "api/explain.h"
#include "expect.h"

using namespace flash_cuda;

namespace {

const char* accept(const FwdParams&) { return nullptr; }
const char* refuse_dropout(const FwdParams& p) {
  return p.dropout_p > 0 ? "dropout is served by sm80" : nullptr;
}
const char* accept_bwd(const BwdParams&) { return nullptr; }
size_t no_workspace(const FwdParams&) { return 0; }
size_t no_workspace_bwd(const BwdParams&) { return 640; }
void no_launch(const FwdParams&, cudaStream_t) {}
void no_launch_bwd(const BwdParams&, cudaStream_t) {}
void no_combine(const CombineParams&, cudaStream_t) {}

constexpr DType kBf16 = DType::kBFloat16;

const FwdKernel kFwd90[] = {
    {"sm90_fwd_hdim64", 90, kBf16, 64, 64, 128, 128, 384, refuse_dropout, no_workspace, no_launch},
    {"sm90_fwd_hdim128", 90, kBf16, 128, 128, 128, 128, 384, refuse_dropout, no_workspace,
     no_launch}};
const FwdKernel kFwd80[] = {
    {"sm80_fwd_hdim64", 80, kBf16, 64, 64, 128, 64, 128, accept, no_workspace, no_launch},
    {"sm80_fwd_hdim256", 80, kBf16, 256, 256, 64, 64, 128, accept, no_workspace, no_launch}};
const FwdKernel kDecode80[] = {{"sm80_decode_hdim128", 80, kBf16, 128, 128, 16, 64, 128,
                                refuse_dropout, no_workspace, no_launch}};
const BwdKernel kBwd80[] = {{"sm80_bwd_hdim128", 80, kBf16, 128, 128, 64, 64, 256, accept_bwd,
                             no_workspace_bwd, no_launch_bwd}};

KernelTable table90() {
  KernelTable t;
  t.fwd = kFwd90;
  t.num_fwd = 2;
  return t;
}
KernelTable table80() {
  KernelTable t;
  t.fwd = kFwd80;
  t.num_fwd = 2;
  t.decode = kDecode80;
  t.num_decode = 1;
  t.bwd = kBwd80;
  t.num_bwd = 1;
  t.combine = no_combine;
  return t;
}
const KernelTable kTable90 = table90(), kTable80 = table80();
const Kernels kHopper{{90, 132, 232448}, {{90, &kTable90}, {80, &kTable80}}, no_combine, nullptr};
const Kernels kAmpere{{80, 108, 166912}, {{80, &kTable80}}, no_combine, nullptr};

FwdParams shape(int head_dim, int head_dim_v) {
  FwdParams p;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  return p;
}

bool is(const FwdKernel* kernel, const char* name) {
  return kernel && std::strcmp(kernel->name, name) == 0;
}

void test_select() {
  EXPECT(is(select_fwd(kHopper, shape(64, 64)), "sm90_fwd_hdim64"));
  EXPECT(is(select_fwd(kHopper, shape(72, 64)), "sm90_fwd_hdim128"));
  EXPECT(is(select_fwd(kHopper, shape(64, 72)), "sm90_fwd_hdim128"));
  EXPECT(is(select_fwd(kHopper, shape(136, 64)), "sm80_fwd_hdim256"));
  EXPECT(is(select_fwd(kAmpere, shape(64, 64)), "sm80_fwd_hdim64"));
  FwdParams dropout = shape(64, 64);
  dropout.dropout_p = 0.1f;
  EXPECT(is(select_fwd(kHopper, dropout), "sm80_fwd_hdim64"));

  std::vector<std::string> reasons;
  EXPECT(select_fwd(kHopper, shape(264, 64), &reasons) == nullptr);
  EXPECT(reasons.size() == 2);
  EXPECT(reasons[1] == "sm80: head_dim/head_dim_v up to 64/64, 256/256, got 264/64");
  FwdParams half = shape(64, 64);
  half.dtype = DType::kFloat16;
  reasons.clear();
  EXPECT(select_fwd(kHopper, half, &reasons) == nullptr);
  EXPECT(reasons[0] == "sm90: takes bfloat16, got float16");
  reasons.clear();
  EXPECT(select_decode(kHopper, dropout, &reasons) == nullptr);
  EXPECT(reasons[0] == "sm90: has no kernel for this op");
  EXPECT(reasons[1] == "sm80_decode_hdim128: dropout is served by sm80");
}

void test_serves() {
  for (int capability : {80, 86, 89, 90, 100, 103, 120}) {
    EXPECT(serves(80, capability));
    EXPECT(serves(90, capability) == (capability == 90));
    EXPECT(serves(100, capability) == (capability == 100 || capability == 103));
    EXPECT(typical_device(capability).compute_capability == capability);
  }
  EXPECT(!serves(80, 75));
}

template <class Call>
RefusalKind kind_of_refusal(Call call) {
  try {
    call();
  } catch (const Refusal& refusal) {
    EXPECT(refusal.what()[0] != '\0');
    return refusal.kind();
  }
  EXPECT(!"refused");
  return RefusalKind::kValue;
}

void test_override() {
  EXPECT(parse_override("").kind == Override::Kind::kNone);
  EXPECT(parse_override("cpu").kind == Override::Kind::kCpu);
  EXPECT(parse_override("sm90").arch == 90);
  EXPECT(parse_override("emulated").kind == Override::Kind::kEmulated);
  EXPECT(parse_override("emulated:sm80").arch == 80);
  for (const char* wrong : {"sm70", "gpu", "emulated:", "emulated:cpu", "SM90"}) {
    EXPECT(kind_of_refusal([&] { parse_override(wrong); }) == RefusalKind::kValue);
  }
  EXPECT(set_override("sm90").empty());
  EXPECT(override_name() == "sm90");
  EXPECT(set_override("") == "sm90");
  TensorInfo q;
  q.device = DeviceType::kCuda;
  const auto kernels = [&] { kernels_for_gpu(kHopper.device, q); };
  EXPECT(kind_of_refusal(kernels) == RefusalKind::kUnsupported);  // this build has none
  set_override("cpu");
  EXPECT(kind_of_refusal(kernels) == RefusalKind::kUnsupported);
  set_override("");
  EXPECT(kind_of_refusal(emulated_kernels) == RefusalKind::kUnsupported);
  EXPECT(kind_of_refusal([] { load_emulated("/nowhere.so", 2); }) == RefusalKind::kValue);
}

// Contiguous tensors of a dense call.
struct Dense {
  Dense(int64_t batch, int64_t seqlen_q, int64_t seqlen_kv, int64_t heads, int64_t heads_kv,
        int64_t dim)
      : q_sizes{batch, seqlen_q, heads, dim}, k_sizes{batch, seqlen_kv, heads_kv, dim} {
    args.q = tensor("q", q_sizes, q_strides);
    args.k = tensor("k", k_sizes, k_strides);
    args.v = tensor("v", k_sizes, k_strides);
  }
  Dense(const Dense&) = delete;

  static TensorInfo tensor(const char* name, int64_t (&sizes)[4], int64_t (&strides)[4]) {
    int64_t stride = 1;
    for (int i = 3; i >= 0; --i) {
      strides[i] = stride;
      stride *= sizes[i];
    }
    TensorInfo t;
    t.name = name;
    t.sizes = sizes;
    t.strides = strides;
    t.ndim = 4;
    t.dtype = ScalarType::kBFloat16;
    t.device = DeviceType::kCuda;
    t.device_index = 0;
    return t;
  }
  FwdCall prepare(const Kernels& kernels) const {
    return prepare_fwd(args, check_fwd(args), kernels);
  }

  int64_t q_sizes[4], q_strides[4], k_sizes[4], k_strides[4];
  FwdArgs args;
};

void test_prepare() {
  {  // training: the newest kernel, whole
    const Dense d(4, 4096, 4096, 16, 16, 128);
    const FwdCall call = d.prepare(kHopper);
    EXPECT(is(call.kernel, "sm90_fwd_hdim128") && !call.combine && call.params.num_splits == 1);
    EXPECT(call.params.window_left == kUnbounded && !call.params.pack_gqa);
  }
  {  // decoding: split, packed
    const Dense d(1, 1, 65536, 32, 4, 128);
    const FwdCall call = d.prepare(kHopper);
    EXPECT(is(call.kernel, "sm80_decode_hdim128") && call.combine && call.params.pack_gqa);
    EXPECT(call.params.num_splits > 16);
    EXPECT(call.out_partial_numel == call.params.num_splits * 32 * 128);
    EXPECT(call.lse_partial_numel == call.params.num_splits * 32);
  }
  {  // a few hundred rows: the split kernel of an older folder only over longer keys, where
     // the newer kernel would leave most of the device idle; of the same folder sooner
    const Dense d(1, 200, 1024, 2, 2, 128), longer(1, 200, 4096, 2, 2, 128);
    EXPECT(is(d.prepare(kHopper).kernel, "sm90_fwd_hdim128"));
    EXPECT(is(longer.prepare(kHopper).kernel, "sm80_decode_hdim128"));
    EXPECT(is(d.prepare(kAmpere).kernel, "sm80_decode_hdim128"));
    const Dense busy(8, 2000, 65536, 8, 8, 128);
    EXPECT(is(busy.prepare(kHopper).kernel, "sm90_fwd_hdim128"));
  }
  {  // a step over few keys: merging would cost more than it brings
    const Dense d(512, 1, 24, 8, 1, 128);
    EXPECT(is(d.prepare(kHopper).kernel, "sm90_fwd_hdim128"));
    const Dense longer(512, 1, 4096, 8, 1, 128);  // packing saves loads, even in one part
    const FwdCall call = longer.prepare(kHopper);
    EXPECT(is(call.kernel, "sm80_decode_hdim128") && call.params.num_splits == 1 && call.combine);
  }
  {  // what only the split kernel can do, in one part if so asked
    Kernels only_decode = kAmpere;
    KernelTable table = kTable80;
    table.num_fwd = 0;
    only_decode.folders[0].table = &table;
    Dense d(4, 4096, 4096, 16, 16, 128);
    d.args.num_splits = 1;
    const FwdCall call = d.prepare(only_decode);
    EXPECT(is(call.kernel, "sm80_decode_hdim128") && call.params.num_splits == 1 && call.combine);
  }
  {  // more than a tile of rows: dealt out and packed where that leaves fewer rows of tiles
    Kernels deals_out = kAmpere;
    KernelTable table = kTable80;
    FwdKernel decode = kDecode80[0];
    decode.deals_out = true;
    decode.block_q = 64;
    table.decode = &decode;
    deals_out.folders[0].table = &table;
    const Dense few(64, 16, 2048, 32, 4, 128), more(64, 64, 2048, 32, 4, 128);
    const FwdCall call = few.prepare(deals_out);
    EXPECT(is(call.kernel, "sm80_decode_hdim128") && call.params.pack_gqa && !call.combine);
    EXPECT(is(more.prepare(deals_out).kernel, "sm80_fwd_hdim256"));
    const Dense each(64, 65, 2048, 4, 4, 128);  // nothing to pack
    EXPECT(is(each.prepare(deals_out).kernel, "sm80_fwd_hdim256"));
  }
  {  // asked for
    Dense d(4, 4096, 4096, 16, 16, 128);
    d.args.num_splits = 3;
    EXPECT(d.prepare(kHopper).params.num_splits == 3 && d.prepare(kHopper).combine);
    d.args.num_splits = 0;
    d.args.split_size = 1000;
    EXPECT(d.prepare(kHopper).params.num_splits == 5);
    EXPECT(d.prepare(kHopper).params.split_size == 1000);
    d.args.dropout_p = 0.5;  // which the split kernel does not have
    int64_t two = 2, one = 1;
    d.args.rng_state = d.args.q;
    d.args.rng_state.dtype = ScalarType::kInt64;
    d.args.rng_state.ndim = 1;
    d.args.rng_state.sizes = &two;
    d.args.rng_state.strides = &one;
    EXPECT(kind_of_refusal([&] { d.prepare(kHopper); }) == RefusalKind::kUnsupported);
    d.args.split_size = 0;
    EXPECT(is(d.prepare(kHopper).kernel, "sm80_fwd_hdim256"));
  }
  {  // one decoding step may be forbidden to split
    Dense d(1, 1, 65536, 32, 4, 128);
    d.args.num_splits = 1;
    EXPECT(is(d.prepare(kHopper).kernel, "sm90_fwd_hdim128"));
  }
}

void test_params() {
  Dense d(2, 5, 7, 4, 2, 64);
  d.args.window_right = 0;
  d.args.num_splits = 1;
  d.q_strides[0] = 0;  // broadcast over the batch
  FwdParams p = d.prepare(kHopper).params;
  EXPECT(p.softmax_scale == 0.125f && p.window_right == 0 && p.window_left == kUnbounded);
  EXPECT(p.q_stride.batch == 0 && p.q_stride.row == 256 && p.k_stride.head == 64);
  EXPECT(p.total_q == 10 && p.total_kv == 14 && p.lse_batch_stride == 20 && p.lse_head_stride == 5);
  EXPECT(p.out_stride.batch == 5 * 256 && p.out_dtype == DType::kBFloat16);
  Dense one(1, 1, 7, 4, 1, 64);
  one.q_strides[0] = one.q_strides[1] = 3;  // of single elements: may be anything
  one.k_strides[2] = 1;
  p = one.prepare(kHopper).params;
  EXPECT(p.q_stride.batch == 256 && p.q_stride.row == 256 && p.k_stride.head == 64);
}

void test_explain() {
  const Dense d(1, 1, 65536, 32, 4, 128);
  Target target;
  target.device = kHopper.device;
  const Explanation e = explain_fwd(d.args, check_fwd(d.args), target);
  EXPECT(!e.served && e.refusal.find("built without") != std::string::npos);
}

}  // namespace

int main() {
  test_select();
  test_serves();
  test_override();
  test_prepare();
  test_params();
  test_explain();
}
