// The ops of flash_cuda: schemas, results and registration. Only this file and torch_tensors.h know
// torch, through its stable ABI.
//
// What a call means, which kernel serves it and how it is launched is api/. Each op is registered
// for CUDA tensors over the compiled kernels and, as `_NAME_emulated`, for CPU tensors over a
// library that
// `_C.load_emulated` has loaded. CPU tensors of the public ops go to flash_cuda/reference, and
// fakes, autograd, autocast and vmap are added from flash_cuda/_ops.py.
//
// Errors: a refusal leaves an op as std::invalid_argument, which torch turns into a ValueError with
// the bare text. Which error it would rather be, ValueError, TypeError or NotImplementedError, the
// Python functions learn from `_C.refusal_type(text)`, called in the same thread with that text.
// Anything else that is thrown (CUDA, an emulated deadlock) arrives as a RuntimeError.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "api/calls.h"
#include "api/check.h"
#include "api/read_args.h"
#include "torch_tensors.h"

namespace flash_cuda {
namespace {

constexpr const char* kFwdSchema =
    "(Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? alibi_slopes=None, "
    "Tensor? sink=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? leftpad_k=None, "
    "Tensor? block_table=None, Tensor? cache_batch_idx=None, Tensor? qv=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "Tensor? rng_state=None, float? softmax_scale=None, int window_left=-1, int window_right=-1, "
    "int attention_chunk=0, bool top_left=False, float softcap=0.0, float dropout_p=0.0, "
    "int num_splits=0, int split_size=0, int pack_gqa=-1, bool strict=False, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None) -> (Tensor out, Tensor lse)";

// `fwd` for a call that leaves the rest at its defaults: torch takes 0.1 us for every argument of a
// schema, given or not. Not public; _autograd.py calls it where nobody can tell the difference.
constexpr const char* kFwdDenseSchema =
    "(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, int window_left=-1, "
    "int window_right=-1) -> (Tensor out, Tensor lse)";

// dq, dk, dv have the dtype and shape of q, k, v; dbias the shape of bias and dsink of sink, both
// float32 (float64 for float64 inputs). All are contiguous; what `wanted` leaves out is empty,
// (0,).
constexpr const char* kBwdSchema =
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? bias=None, Tensor? alibi_slopes=None, Tensor? sink=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "Tensor? rng_state=None, float? softmax_scale=None, int window_left=-1, int window_right=-1, "
    "int attention_chunk=0, bool top_left=False, float softcap=0.0, float dropout_p=0.0, "
    "bool strict=False, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "bool deterministic=False, int wanted=7) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)";

constexpr const char* kCombineSchema =
    "(Tensor out_partial, Tensor lse_partial, ScalarType? dtype=None) -> (Tensor out, Tensor lse)";

constexpr const char* kKvAppendSchema =
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    "Tensor? block_table=None, Tensor? cache_batch_idx=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, bool rotary_interleaved=True) -> ()";

// ---- values of lengths

// Copies tensors to the host, which waits for the GPU.
void fetch(ArgReader& in, std::initializer_list<TensorInfo*> tensors) {
  for (TensorInfo* t : tensors) {
    if (!t->given() || t->device == DeviceType::kCpu) continue;
    const stable::Device cpu(torch::headeronly::DeviceType::CPU, 0);
    *t = in.keep(t->name, stable::to(in.tensor_of(*t), cpu));
  }
}

// The checks of values, in the debug mode.
void check_values(ArgReader& in, FwdArgs a, const Sizes& sizes) {
  if (!debug_mode()) return;
  fetch(in, {&a.cu_seqlens_q, &a.cu_seqlens_k, &a.seqused_q, &a.seqused_k, &a.leftpad_k,
             &a.block_table, &a.cache_batch_idx});
  check_lengths(a, sizes);
}
void check_values(ArgReader& in, KvAppendArgs a) {
  if (!debug_mode()) return;
  fetch(in, {&a.cache_seqlens, &a.block_table, &a.cache_batch_idx});
  check_append_lengths(a);
}

// ---- keys without a single row
//
// Where a sink makes the result more than zeros, a kernel has to run. It is given one row of
// keys that no sequence counts.
class NoKeys {
 public:
  NoKeys(FwdArgs& a, Sizes& s)
      : rows_(Buffer({s.num_heads_kv * std::max(s.head_dim, s.head_dim_v)}, a.q.dtype, a.q)),
        used_(Buffer({s.batch}, ScalarType::kInt32, a.q)),
        sizes_{s.batch, 1, s.num_heads_kv, s.head_dim},
        sizes_v_{s.batch, 1, s.num_heads_kv, s.head_dim_v},
        used_size_{s.batch} {
    rows_.zero();
    used_.zero();
    const auto tensor = [](TensorInfo& t, const void* data, int ndim, const int64_t* sizes,
                           const int64_t* strides) {
      t.data = data;
      t.ndim = ndim;
      t.sizes = sizes;
      t.strides = strides;
    };
    tensor(a.k, rows_.data(), 4, sizes_, strides_);
    tensor(a.v, rows_.data(), 4, sizes_v_, strides_v_);
    strides_[2] = s.head_dim;
    strides_v_[2] = s.head_dim_v;
    a.seqused_k = a.q;
    a.seqused_k.name = "seqused_k";
    a.seqused_k.dtype = ScalarType::kInt32;
    tensor(a.seqused_k, used_.data(), 1, used_size_, unit_stride_);
    a.cu_seqlens_k = a.leftpad_k = a.block_table = a.cache_batch_idx = a.bias = TensorInfo{};
    s.seqlen_kv = 1;
    s.total_kv = s.batch;
    s.page_size = s.num_pages = 0;
  }

 private:
  Buffer rows_, used_;
  int64_t sizes_[4], sizes_v_[4], used_size_[1];
  int64_t strides_[4] = {0, 0, 0, 1}, strides_v_[4] = {0, 0, 0, 1}, unit_stride_[1] = {1};
};

// ---- the ops

void run_fwd(FwdCall& call, const FwdArgs& a, void* out, float* lse, cudaStream_t stream) {
  FwdParams& p = call.params;
  p.out = out;
  p.lse = lse;
  std::vector<Buffer> held;  // freed after the launch, in the order of the stream
  if (call.combine != nullptr) {
    held.push_back(Buffer({call.out_partial_numel}, ScalarType::kFloat32, a.q));
    p.out_partial = held.back().data<float>();
    held.push_back(Buffer({call.lse_partial_numel}, ScalarType::kFloat32, a.q));
    p.lse_partial = held.back().data<float>();
    if (a.cu_seqlens_q.given()) held.back().fill(-INFINITY);  // rows behind the last sequence
  }
  if (call.workspace_bytes > 0) {
    held.push_back(bytes(call.workspace_bytes, a.q));
    p.workspace = held.back().data();
  }
  launch(call, stream);
}

template <bool kEmulated, FwdArgs (*kRead)(ArgReader&) = read_fwd<ArgReader>>
void fwd(StableIValue* stack) {
  ArgReader in(stack);
  FwdArgs a = kRead(in);
  Sizes s = check_fwd(a);
  check_values(in, a, s);
  const Place<kEmulated> place(a.q);
  const ScalarType out_type = out_dtype_of(a.q);
  const bool packed = a.cu_seqlens_q.given();
  Buffer out = packed ? Buffer({s.total_q, s.num_heads_q, s.head_dim_v}, out_type, a.q)
                      : Buffer({s.batch, a.q.size(1), s.num_heads_q, s.head_dim_v}, out_type, a.q);
  Buffer lse = packed ? Buffer({s.num_heads_q, s.total_q}, ScalarType::kFloat32, a.q)
                      : Buffer({s.batch, s.num_heads_q, a.q.size(1)}, ScalarType::kFloat32, a.q);
  if (!has_queries(s) || (!has_keys(s) && !a.sink.given())) {
    out.zero();
    lse.fill(-INFINITY);
  } else {
    std::optional<NoKeys> no_keys;
    if (!has_keys(s)) no_keys.emplace(a, s);
    FwdCall call = prepare_fwd(a, s, place.kernels);
    run_fwd(call, a, out.data(), lse.data<float>(), place.stream);
  }
  stack[0] = out.release();
  stack[1] = lse.release();
}

void fwd_dense(StableIValue* stack) { fwd<false, read_fwd_dense<ArgReader>>(stack); }

// The five results of bwd; one that is not wanted is empty.
struct Gradients {
  Gradients(const BwdArgs& b)
      : dq(make(b, kWantDq, b.fwd.q, b.fwd.q.dtype)),
        dk(make(b, kWantDk, b.fwd.k, b.fwd.k.dtype)),
        dv(make(b, kWantDv, b.fwd.v, b.fwd.v.dtype)),
        dbias(make(b, kWantDbias, b.fwd.bias, ScalarType::kFloat32)),
        dsink(make(b, kWantDsink, b.fwd.sink, ScalarType::kFloat32)) {
    if (b.wanted & kWantDsink) dsink.zero();
  }
  static Buffer make(const BwdArgs& b, int bit, const TensorInfo& t, ScalarType type) {
    return b.wanted & bit ? like(t, type) : Buffer::empty(type, b.fwd.q);
  }
  void set_pointers(BwdParams& p) const {
    if (p.wanted & kWantDq) p.dq = dq.data();
    if (p.wanted & kWantDk) p.dk = dk.data();
    if (p.wanted & kWantDv) p.dv = dv.data();
    if (p.wanted & kWantDbias) p.dbias = dbias.data<float>();
    if (p.wanted & kWantDsink) p.dsink = dsink.data<float>();
  }
  void zero_all() {
    for (Buffer* g : {&dq, &dk, &dv, &dbias}) g->zero();
  }
  Buffer dq, dk, dv, dbias, dsink;
};

template <bool kEmulated>
void bwd(StableIValue* stack) {
  ArgReader in(stack);
  BwdArgs b = read_bwd(in);
  Sizes s = check_bwd(b);
  check_values(in, b.fwd, s);
  const Place<kEmulated> place(b.fwd.q);
  for (TensorInfo* t : {&b.dout, &b.dlse, &b.out, &b.lse}) in.make_rows_contiguous(*t);
  Gradients gradients(b);
  std::optional<NoKeys> no_keys;
  if (!has_queries(s) || !has_keys(s)) {
    gradients.zero_all();
    // Without keys only the sink is left, and lse depends on it.
    b.wanted = has_queries(s) && b.dlse.given() ? b.wanted & kWantDsink : 0;
    if (b.wanted) no_keys.emplace(b.fwd, s);
  }
  if (b.wanted) {
    BwdCall call = prepare_bwd(b, s, place.kernels);
    gradients.set_pointers(call.params);
    std::optional<Buffer> workspace;
    if (call.workspace_bytes > 0) {
      workspace.emplace(bytes(call.workspace_bytes, b.fwd.q));
      call.params.workspace = workspace->data();
    }
    launch(call, place.stream);
  }
  int i = 0;
  for (Buffer* g :
       {&gradients.dq, &gradients.dk, &gradients.dv, &gradients.dbias, &gradients.dsink}) {
    stack[i++] = g->release();
  }
}

template <bool kEmulated>
void combine(StableIValue* stack) {
  ArgReader in(stack);
  const CombineArgs a = read_combine(in);
  check_combine(a);
  const Place<kEmulated> place(a.out_partial);
  Buffer out(a.out_partial.sizes + 1, 4, a.dtype, a.out_partial);
  Buffer lse(a.lse_partial.sizes + 1, 3, a.lse_partial.dtype, a.out_partial);
  if (a.out_partial.numel() == 0) {
    out.zero();
    lse.fill(-INFINITY);
  } else {
    kernel_dtype(a.out_partial);  // refuses float64
    if (!place.kernels.combine) refuse_no_kernel(place.kernels, {"combine is not built"});
    TensorInfo result = a.out_partial;
    result.name = "dtype";
    result.dtype = a.dtype;
    place.kernels.combine(combine_params(a, out.data(), kernel_dtype(result), lse.data<float>()),
                          place.stream);
  }
  stack[0] = out.release();
  stack[1] = lse.release();
}

template <bool kEmulated>
void kv_append_(StableIValue* stack) {
  ArgReader in(stack);
  const KvAppendArgs a = read_kv_append(in);
  check_kv_append(a);
  check_values(in, a);
  const Place<kEmulated> place(a.k);
  if (a.k.numel() == 0) return;
  if (!place.kernels.kv_append) refuse_no_kernel(place.kernels, {"kv_append_ is not built"});
  place.kernels.kv_append(kv_append_params(a), place.stream);
}

// The form that torch calls; notes refusals for `_C.refusal_type`.
template <void (*kOp)(StableIValue*)>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  try {
    kOp(stack);
  } catch (const Refusal& refusal) {
    note_refusal(refusal);
    throw;
  }
}

}  // namespace
}  // namespace flash_cuda

STABLE_TORCH_LIBRARY(flash_cuda, m) {
  const struct {
    const char *name, *emulated, *schema;
  } ops[] = {{"fwd", "_fwd_emulated", flash_cuda::kFwdSchema},
             {"bwd", "_bwd_emulated", flash_cuda::kBwdSchema},
             {"combine", "_combine_emulated", flash_cuda::kCombineSchema},
             {"kv_append_", "_kv_append_emulated_", flash_cuda::kKvAppendSchema}};
  for (const auto& op : ops) {
    m.def((std::string(op.name) + op.schema).c_str());
    m.def((std::string(op.emulated) + op.schema).c_str());
  }
  m.def((std::string("_fwd_dense") + flash_cuda::kFwdDenseSchema).c_str());
}

STABLE_TORCH_LIBRARY_IMPL(flash_cuda, CUDA, m) {
  m.impl("fwd", &flash_cuda::boxed<flash_cuda::fwd<false>>);
  m.impl("_fwd_dense", &flash_cuda::boxed<flash_cuda::fwd_dense>);
  m.impl("bwd", &flash_cuda::boxed<flash_cuda::bwd<false>>);
  m.impl("combine", &flash_cuda::boxed<flash_cuda::combine<false>>);
  m.impl("kv_append_", &flash_cuda::boxed<flash_cuda::kv_append_<false>>);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cuda, CPU, m) {
  m.impl("_fwd_emulated", &flash_cuda::boxed<flash_cuda::fwd<true>>);
  m.impl("_bwd_emulated", &flash_cuda::boxed<flash_cuda::bwd<true>>);
  m.impl("_combine_emulated", &flash_cuda::boxed<flash_cuda::combine<true>>);
  m.impl("_kv_append_emulated_", &flash_cuda::boxed<flash_cuda::kv_append_<true>>);
}
