// Checks of combine and kv_append_.
#include <algorithm>
#include <utility>
#include <vector>

#include "api/check.h"
#include "api/check_tensor.h"

namespace flash_cuda {

namespace {

// Rows that share memory would overwrite each other: those of an expanded tensor, and of one whose
// steps in one dimension are shorter than all that lies along the others.
void check_written(const TensorInfo& cache) {
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (int i = 0; i < cache.ndim; ++i) {
    if (cache.size(i) <= 1) continue;
    if (cache.stride(i) == 0) {
      refuse_value(cache.name,
                   " is written to and must not be expanded, got stride 0 in dimension ", i);
    }
    steps.emplace_back(cache.stride(i), cache.size(i));
  }
  std::sort(steps.begin(), steps.end());
  int64_t extent = 1;  // elements from the first to behind the last, along the shorter steps
  for (const auto& [stride, size] : steps) {
    if (stride < extent) {
      refuse_value(cache.name, " is written to and its rows must not overlap, got shape ",
                   shape_text(cache), " with a stride of ", stride);
    }
    extent += (size - 1) * stride;
  }
}

}  // namespace

void check_combine(const CombineArgs& a) {
  check_device(a.lse_partial, a.out_partial);
  if (a.out_partial.dtype != ScalarType::kFloat64) check_dtype(a.out_partial, ScalarType::kFloat32);
  check_dtype(a.lse_partial, a.out_partial.dtype);
  const TensorInfo& o = a.out_partial;
  if (o.ndim != 5) {
    refuse_value("out_partial must have shape (splits, batch, seqlen, num_heads, head_dim_v), got ",
                 shape_text(o));
  }
  check_shape(a.lse_partial, {o.size(0), o.size(1), o.size(3), o.size(2)},
              "(splits, batch, num_heads, seqlen)");
  check_rows_contiguous(o);
  if (a.has_dtype && (!is_attention_dtype(a.dtype) || a.dtype == ScalarType::kFloat8E4M3)) {
    refuse_type("dtype must be float16, bfloat16, float32 or float64, got ", name_of(a.dtype));
  }
}

void check_kv_append(const KvAppendArgs& a) {
  const TensorInfo& k = a.k;
  for (const TensorInfo* t : {&a.k_cache, &a.v_cache, &a.v, &a.cache_seqlens, &a.block_table,
                              &a.cache_batch_idx, &a.rotary_cos, &a.rotary_sin}) {
    check_device(*t, k);
  }
  check_qkv_dtype(k, a.v, a.k_cache);
  check_qkv_dtype(k, a.v, a.v_cache);
  for (const TensorInfo* t : {&a.k, &a.v, &a.k_cache, &a.v_cache}) {
    const bool cache = t == &a.k_cache || t == &a.v_cache;
    if (t->ndim != 4) {
      refuse_value(t->name, " must have shape ",
                   cache ? "(cache rows or pages, capacity or page_size" : "(batch, seqlen_new",
                   ", num_heads_kv, head_dim), got ", shape_text(*t));
    }
    check_rows_contiguous(*t);
    if (cache) check_written(*t);
  }
  const bool shared = a.k_cache.data == a.v_cache.data && a.k_cache.data != nullptr;
  if (shared && a.k_cache.numel() > 0 && a.v_cache.numel() > 0) {
    refuse_value("k_cache and v_cache are written to and must not be the same tensor");
  }
  const int64_t batch = k.size(0), heads = k.size(2);
  check_shape(a.v, {batch, k.size(1), heads, a.v_cache.size(3)},
              "(batch, seqlen_new, num_heads_kv, head_dim_v)");
  check_shape(a.k_cache, {a.k_cache.size(0), a.k_cache.size(1), heads, k.size(3)},
              "(cache rows, capacity, num_heads_kv, head_dim)");
  check_shape(a.v_cache, {a.k_cache.size(0), a.k_cache.size(1), heads, a.v_cache.size(3)},
              "(cache rows, capacity, num_heads_kv, head_dim_v)");
  check_lengths_vector(a.cache_seqlens, batch);
  check_lengths_vector(a.cache_batch_idx, batch);
  int64_t capacity = a.k_cache.size(1);
  if (a.block_table.given()) {
    if (a.cache_batch_idx.given()) {
      refuse_value(
          "block_table and cache_batch_idx exclude each other: choose rows of block_table");
    }
    check_dtype(a.block_table, ScalarType::kInt32);
    if (a.block_table.ndim != 2 || a.block_table.size(0) != batch) {
      refuse_value("block_table must have shape (batch, pages a sequence) = (", batch,
                   ", ...), got ", shape_text(a.block_table));
    }
    check_rows_contiguous(a.block_table);
    capacity *= a.block_table.size(1);
  } else if (!a.cache_batch_idx.given() && a.k_cache.size(0) != batch) {
    refuse_value("k_cache must have the batch of k (", batch,
                 ") or come with cache_batch_idx or block_table; got shape ",
                 shape_text(a.k_cache));
  }
  if (k.size(1) > capacity) {
    refuse_value("k has ", k.size(1), " new rows a sequence, more than the capacity of the cache, ",
                 capacity);
  }
  if (a.rotary_cos.given() != a.rotary_sin.given()) {
    refuse_value("rotary_cos and rotary_sin must be given together");
  }
  if (!a.rotary_cos.given()) return;
  for (const TensorInfo* t : {&a.rotary_cos, &a.rotary_sin}) {
    check_dtype(*t, k.dtype);
    if (t->ndim != 2 || 2 * t->size(1) > k.size(3)) {
      refuse_value(t->name,
                   " must have shape (positions, rotary_dim / 2) with rotary_dim at most "
                   "head_dim = ",
                   k.size(3), ", got ", shape_text(*t));
    }
    check_shape(*t, {a.rotary_cos.size(0), a.rotary_cos.size(1)}, "that of rotary_cos");
    if (t->size(0) > 1 && t->stride(0) != t->size(1)) {
      refuse_value(t->name, " must be contiguous, got row stride ", t->stride(0));
    }
    check_rows_contiguous(*t);
  }
}

}  // namespace flash_cuda
