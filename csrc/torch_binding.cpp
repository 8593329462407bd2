// The ops of flash_cuda and the only C++ file that knows torch (through its stable ABI).
//
// Schemas, reading the arguments, allocation, device and stream; what a call means, which kernel
// serves it and how it is launched is api/. Each op is registered for CUDA tensors over the
// compiled kernels and, as `_NAME_emulated`, for CPU tensors over a library that
// `_C.load_emulated` has loaded. CPU tensors of the public ops go to flash_cuda/reference, and
// fakes, autograd, autocast and vmap are added in flash_cuda/_ops.py.
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>

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

// dq, dk, dv have the dtype and shape of q, k, v; dbias the shape of bias and dsink of sink, both
// float32 (float64 for float64 inputs). All are contiguous; what `wanted` leaves out is empty, (0,).
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

void not_built(StableIValue*, uint64_t, uint64_t) {
  throw std::invalid_argument(
      "flash_cuda was built without CUDA kernels: rebuild it with FLASH_CUDA_ARCHS=native");
}

}  // namespace

STABLE_TORCH_LIBRARY(flash_cuda, m) {
  const struct {
    const char *name, *emulated, *schema;
  } ops[] = {{"fwd", "_fwd_emulated", kFwdSchema},
             {"bwd", "_bwd_emulated", kBwdSchema},
             {"combine", "_combine_emulated", kCombineSchema},
             {"kv_append_", "_kv_append_emulated_", kKvAppendSchema}};
  for (const auto& op : ops) {
    m.def((std::string(op.name) + op.schema).c_str());
    m.def((std::string(op.emulated) + op.schema).c_str());
  }
}

STABLE_TORCH_LIBRARY_IMPL(flash_cuda, CUDA, m) {
  m.impl("fwd", &not_built);
  m.impl("bwd", &not_built);
  m.impl("combine", &not_built);
  m.impl("kv_append_", &not_built);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cuda, CPU, m) {
  m.impl("_fwd_emulated", &not_built);
  m.impl("_bwd_emulated", &not_built);
  m.impl("_combine_emulated", &not_built);
  m.impl("_kv_append_emulated_", &not_built);
}
