#include "api/calls.h"

#include <limits>

#include "api/fill_params.h"
#include "api/plan.h"
#include "common/host_device.h"

namespace flash_cuda {

namespace {

constexpr int kMaxAutomaticSplits = 128;
// Rows of a tile up to which the split-KV kernels of sm80 are bound by memory, as any kernel is.
constexpr int kMemoryBoundRows = 32;
// Rows a KV head up to which the split-KV kernels were measured against the forward with pages.
constexpr int kPagedRows = 1024;

SplitShape split_shape(const FwdArgs& a, const FwdParams& p, const FwdKernel& row) {
  SplitShape s;
  s.batch = p.batch;
  s.num_heads_q = p.num_heads_q;
  s.num_heads_kv = p.num_heads_kv;
  s.total_q = p.total_q;
  // Without a hint the average length stands for the longest: only speed depends on it.
  const int64_t batch = max_of(p.batch, 1);
  const bool average_q = p.cu_seqlens_q && a.max_seqlen_q == kNotGiven;
  s.seqlen_q = average_q ? ceil_div(p.total_q, batch) : p.seqlen_q;
  const bool average_kv = p.cu_seqlens_k && a.max_seqlen_k == kNotGiven;
  s.visible_kv = average_kv ? ceil_div(p.total_kv, batch) : p.seqlen_kv;
  if (a.max_seqlen_k >= 0) s.visible_kv = min_of(s.visible_kv, a.max_seqlen_k);
  s.block_q = row.block_q;
  s.block_kv = row.block_kv;
  s.num_sms = p.num_sms;
  const int64_t tile_rows = min_of(s.seqlen_q, int64_t{row.block_q});
  if (p.window_left < kUnbounded && p.window_right < kUnbounded) {
    s.visible_kv = min_of(s.visible_kv, p.window_left + int64_t{p.window_right} + tile_rows);
  }
  if (p.attention_chunk > 0) {
    s.visible_kv = min_of(s.visible_kv, p.attention_chunk + tile_rows);
  }
  return s;
}

// Sizes and strides of the partials of `p.num_splits` parts.
void fill_partials(FwdCall& call) {
  FwdParams& p = call.params;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t row = int64_t{p.num_heads_q} * p.head_dim_v;
  p.out_partial_split_stride = p.total_q * row;
  p.out_partial_stride = {packed ? 0 : p.seqlen_q * row, row, p.head_dim_v};
  const int64_t lse_rows = packed ? p.total_q : p.seqlen_q;
  p.lse_partial_split_stride = p.total_q * p.num_heads_q;
  p.lse_partial_batch_stride = packed ? 0 : p.num_heads_q * lse_rows;
  p.lse_partial_head_stride = lse_rows;
  call.out_partial_numel = p.num_splits * p.out_partial_split_stride;
  call.lse_partial_numel = p.num_splits * p.lse_partial_split_stride;
}

// The split-KV kernel that the call asks for; refuses the call if there is none.
const FwdKernel* split_as_asked(const FwdArgs& a, const Kernels& kernels, FwdParams& p) {
  p.num_splits = static_cast<int>(max_of(a.num_splits, int64_t{2}));
  p.split_size = static_cast<int>(min_of(a.split_size, int64_t{kUnbounded}));
  const FwdKernel* row = select_decode(kernels, p);
  if (row == nullptr) {
    std::vector<std::string> reasons;
    select_decode(kernels, p, &reasons);
    refuse_no_kernel(kernels, reasons);
  }
  if (a.pack_gqa < 0) p.pack_gqa = plan_pack_gqa(split_shape(a, p, *row));
  if (a.split_size > 0) {
    p.num_splits = ceil_div(p.seqlen_kv, p.split_size);
  }
  return row;
}

// Tiles of a kernel that serves the call in one part and packs no heads.
int64_t tiles_of(const FwdKernel& whole, SplitShape shape) {
  shape.block_q = whole.block_q;
  return count_tiles(shape, false);
}

// The split-KV kernel where it is faster than `whole`, the kernel that serves the call in one
// part (null: none does); else null. Fills the split fields of `p`.
const FwdKernel* split_if_faster(const FwdArgs& a, const Kernels& kernels, const FwdKernel* whole,
                                 FwdParams& p) {
  FwdParams split = p;
  split.num_splits = a.num_splits == 1 ? 1 : 2;
  const FwdKernel* row = select_decode(kernels, split);
  if (row == nullptr) return nullptr;
  const SplitShape shape = split_shape(a, split, *row);
  if (a.pack_gqa < 0) split.pack_gqa = plan_pack_gqa(shape);
  if (a.num_splits != 1) {
    split.num_splits = plan_num_splits(shape, split.pack_gqa, kMaxAutomaticSplits);
    // Blocks of 32 keys or more, counted in int on the device, each tile with two more.
    const int64_t blocks = count_tiles(shape, split.pack_gqa) * (shape.visible_kv / 32 + 3);
    split.dealt_out = row->deals_out && blocks <= std::numeric_limits<int>::max();
  }
  bool faster = whole == nullptr;
  const bool older = !faster && whole->arch > row->arch;
  const auto beats_newer = [&] {
    return beats_newer_kernel(count_tiles(shape, split.pack_gqa), tiles_of(*whole, shape),
                              shape.visible_kv, p.num_sms);
  };
  if (!faster && a.num_splits != 1 && is_decode(shape, split.pack_gqa)) {
    // In one part, packing alone pays where loads of K and V outweigh the partials, and so does
    // dealing out.
    const int64_t rows = shape.seqlen_q * (p.num_heads_q / p.num_heads_kv);
    const bool helps = split.pack_gqa || split.dealt_out;
    faster = split.num_splits > 1 || (helps && shape.visible_kv > 4 * rows);
    if (older && (split.pack_gqa ? rows : shape.seqlen_q) > kMemoryBoundRows)
      faster = faster && beats_newer();
  } else if (older) {
    faster = (split.num_splits > 1 || split.dealt_out) && beats_newer();
  } else if (!faster) {
    // More than a tile of rows: if most of the device would idle, or if the rows of all tiles,
    // fewer where heads are packed, take less time. A row takes the forward half the time, but
    // with pages twice, as far as that is measured (docs/tuning.md).
    const int64_t tiles = count_tiles(shape, split.pack_gqa), rows = tiles * shape.block_q;
    const int64_t whole_rows = tiles_of(*whole, shape) * whole->block_q;
    const int64_t group = p.num_heads_q / p.num_heads_kv;
    const bool idle = split.num_splits > 1 && 2 * tiles <= p.num_sms;
    const bool fewer = p.block_table ? rows < 2 * whole_rows && shape.seqlen_q * group <= kPagedRows
                                     : 2 * rows < whole_rows;
    faster = idle || (split.dealt_out && fewer);
  }
  if (!faster) return nullptr;
  p = split;
  return row;
}

}  // namespace

bool has_queries(const Sizes& s) {
  return s.batch > 0 && s.seqlen_q > 0 && s.total_q > 0 && s.num_heads_q > 0;
}
bool has_keys(const Sizes& s) { return s.seqlen_kv > 0 && s.total_kv > 0; }

ScalarType out_dtype_of(const TensorInfo& q) {
  return q.dtype == ScalarType::kFloat8E4M3 ? ScalarType::kBFloat16 : q.dtype;
}

DType kernel_dtype(const TensorInfo& t) {
  switch (t.dtype) {
    case ScalarType::kFloat16:
      return DType::kFloat16;
    case ScalarType::kBFloat16:
      return DType::kBFloat16;
    case ScalarType::kFloat8E4M3:
      return DType::kFloat8E4M3;
    case ScalarType::kFloat32:
      return DType::kFloat32;
    default:
      refuse_unsupported(t.name, " is ", name_of(t.dtype),
                         ", which only CPU tensors can be; kernels "
                         "take float16, bfloat16 and float8_e4m3fn");
  }
}

FwdCall prepare_fwd(const FwdArgs& a, const Sizes& s, const Kernels& kernels) {
  FwdCall call;
  FwdParams& p = call.params;
  p = fill_fwd_params(a, s, kernels.device);
  p.pack_gqa = a.pack_gqa == 1;
  if (a.num_splits > 1 || a.split_size > 0) {
    call.kernel = split_as_asked(a, kernels, p);
  } else {
    const FwdKernel* whole = select_fwd(kernels, p);
    call.kernel = split_if_faster(a, kernels, whole, p);
    if (call.kernel == nullptr) {
      if (whole == nullptr) {
        std::vector<std::string> reasons;
        select_fwd(kernels, p, &reasons);
        refuse_no_kernel(kernels, reasons);
      }
      call.kernel = whole;
      call.workspace_bytes = whole->workspace_bytes(p);
      return call;
    }
  }
  if (p.dealt_out) {
    call.workspace_bytes = call.kernel->workspace_bytes(p);
    return call;
  }
  if (!kernels.combine) refuse_no_kernel(kernels, {"combine is not built"});
  call.combine = kernels.combine;
  fill_partials(call);
  call.workspace_bytes = call.kernel->workspace_bytes(p);
  return call;
}

BwdCall prepare_bwd(const BwdArgs& b, const Sizes& s, const Kernels& kernels) {
  BwdCall call;
  call.params = fill_bwd_params(b, s, kernels.device);
  call.kernel = select_bwd(kernels, call.params);
  if (call.kernel == nullptr) {
    std::vector<std::string> reasons;
    select_bwd(kernels, call.params, &reasons);
    refuse_no_kernel(kernels, reasons);
  }
  call.workspace_bytes = call.kernel->workspace_bytes(call.params);
  return call;
}

void launch(const FwdCall& call, cudaStream_t stream) {
  const FwdParams& p = call.params;
  call.kernel->launch(p, stream);
  if (call.combine == nullptr) return;
  const bool packed = p.cu_seqlens_q != nullptr;
  CombineParams c;
  c.out_partial = p.out_partial;
  c.op_split_stride = p.out_partial_split_stride;
  c.op_batch_stride = p.out_partial_stride.batch;
  c.op_row_stride = p.out_partial_stride.row;
  c.op_head_stride = p.out_partial_stride.head;
  c.lse_partial = p.lse_partial;
  c.lp_split_stride = p.lse_partial_split_stride;
  c.lp_batch_stride = p.lse_partial_batch_stride;
  c.lp_head_stride = p.lse_partial_head_stride;
  c.lp_row_stride = 1;
  c.out = p.out;
  c.lse = p.lse;
  c.out_dtype = p.out_dtype;
  c.out_stride = p.out_stride;
  c.lse_batch_stride = p.lse_batch_stride;
  c.lse_head_stride = p.lse_head_stride;
  c.num_splits = p.num_splits;
  c.batch = packed ? 1 : p.batch;
  c.seqlen = static_cast<int>(packed ? p.total_q : p.seqlen_q);
  c.num_heads = p.num_heads_q;
  c.head_dim_v = p.head_dim_v;
  call.combine(c, stream);
}

void launch(const BwdCall& call, cudaStream_t stream) { call.kernel->launch(call.params, stream); }

CombineParams combine_params(const CombineArgs& a, void* out, DType out_dtype, float* lse) {
  const TensorInfo &op = a.out_partial, &lp = a.lse_partial;
  CombineParams c;
  c.out_partial = op.as<float>();
  c.op_split_stride = op.stride(0);
  c.op_batch_stride = op.stride(1);
  c.op_row_stride = op.stride(2);
  c.op_head_stride = op.stride(3);
  c.lse_partial = lp.as<float>();
  c.lp_split_stride = lp.stride(0);
  c.lp_batch_stride = lp.stride(1);
  c.lp_head_stride = lp.stride(2);
  c.lp_row_stride = lp.stride(3);
  c.out = out;
  c.lse = lse;
  c.out_dtype = out_dtype;
  c.num_splits = static_cast<int>(op.size(0));
  c.batch = static_cast<int>(op.size(1));
  c.seqlen = static_cast<int>(op.size(2));
  c.num_heads = static_cast<int>(op.size(3));
  c.head_dim_v = static_cast<int>(op.size(4));
  const int64_t row = op.size(3) * op.size(4);
  c.out_stride = {op.size(2) * row, row, op.size(4)};
  c.lse_head_stride = op.size(2);
  c.lse_batch_stride = op.size(3) * op.size(2);
  return c;
}

KvAppendParams kv_append_params(const KvAppendArgs& a) {
  KvAppendParams p;
  p.k = a.k.data;
  p.v = a.v.data;
  p.k_stride = stride_of(a.k);
  p.v_stride = stride_of(a.v);
  p.k_cache = const_cast<void*>(a.k_cache.data);
  p.v_cache = const_cast<void*>(a.v_cache.data);
  p.k_cache_stride = stride_of(a.k_cache);
  p.v_cache_stride = stride_of(a.v_cache);
  p.cache_seqlens = a.cache_seqlens.as<int>();
  p.capacity = static_cast<int>(a.k_cache.size(1));
  if (a.block_table.given()) {
    p.block_table = a.block_table.as<int>();
    p.block_table_stride = a.block_table.stride(0);
    p.num_pages = static_cast<int>(a.k_cache.size(0));
    p.page_size = static_cast<int>(a.k_cache.size(1));
    p.capacity = static_cast<int>(a.block_table.size(1) * a.k_cache.size(1));
  }
  if (a.cache_batch_idx.given()) p.cache_batch_idx = a.cache_batch_idx.as<int>();
  if (a.rotary_cos.given()) {
    p.rotary_cos = a.rotary_cos.data;
    p.rotary_sin = a.rotary_sin.data;
    p.rotary_dim = static_cast<int>(2 * a.rotary_cos.size(1));
    p.rotary_positions = static_cast<int>(a.rotary_cos.size(0));
  }
  p.rotary_interleaved = a.rotary_interleaved;
  p.dtype = kernel_dtype(a.k);
  p.batch = static_cast<int>(a.k.size(0));
  p.seqlen_new = static_cast<int>(a.k.size(1));
  p.num_heads_kv = static_cast<int>(a.k.size(2));
  p.head_dim = static_cast<int>(a.k.size(3));
  p.head_dim_v = static_cast<int>(a.v.size(3));
  return p;
}

}  // namespace flash_cuda
