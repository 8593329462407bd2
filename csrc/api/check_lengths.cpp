// Checks of values: what check.cpp cannot see in shapes.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "api/check.h"
#include "common/host_device.h"

namespace flash_cuda {

namespace {

void check_hint(const TensorInfo& t, const char* hint_name, int64_t hint) {
  if (!t.given() || hint == kNotGiven) return;
  const int* cu = t.as<int>();
  for (int64_t b = 0; b + 1 < t.size(0); ++b) {
    const int64_t length = int64_t{cu[b + 1]} - cu[b];
    if (length > hint) {
      refuse_value(hint_name, " must be at least every length, got ", hint, " and a length of ",
                   length, " for sequence ", b);
    }
  }
}

void check_cu_seqlens_values(const TensorInfo& t, int64_t total) {
  if (!t.given()) return;
  const int* cu = t.as<int>();
  if (cu[0] != 0) refuse_value(t.name, " must start with 0, got ", cu[0]);
  for (int64_t b = 0; b + 1 < t.size(0); ++b) {
    if (cu[b + 1] < cu[b]) {
      refuse_value(t.name, " must not decrease, got ", cu[b], " before ", cu[b + 1], " at ", b + 1);
    }
  }
  const int last = cu[t.size(0) - 1];
  if (last > total) {
    refuse_value(t.name, " must end at most at the number of rows, ", total, ", got ", last);
  }
}

// The rows that sequence b has in q (or k), before seqused.
int64_t slot(const TensorInfo& cu_seqlens, int64_t dense, int64_t b) {
  if (!cu_seqlens.given()) return dense;
  return cu_seqlens.as<int>()[b + 1] - cu_seqlens.as<int>()[b];
}

void check_used(const TensorInfo& used, const TensorInfo& cu_seqlens, int64_t dense,
                int64_t batch) {
  if (!used.given()) return;
  for (int64_t b = 0; b < batch; ++b) {
    const int n = used.as<int>()[b];
    if (n < 0 || n > slot(cu_seqlens, dense, b)) {
      refuse_value(used.name, " must be 0 to the length of the sequence, ",
                   slot(cu_seqlens, dense, b), ", got ", n, " for sequence ", b);
    }
  }
}

void check_cache_row(const TensorInfo& cache_batch_idx, int64_t rows, int64_t b) {
  if (!cache_batch_idx.given()) return;
  const int row = cache_batch_idx.as<int>()[b];
  if (row < 0 || row >= rows) {
    refuse_value("cache_batch_idx must be 0 to ", rows - 1, ", got ", row, " for sequence ", b);
  }
}

// Entries behind the length, and before the first key that counts, may be anything.
void check_pages(const TensorInfo& table, int64_t first, int64_t length, int64_t page_size,
                 int64_t num_pages, int64_t b) {
  if (!table.given()) return;
  const int* pages = table.as<int>() + b * table.stride(0);
  for (int64_t i = first / page_size; i < ceil_div(length, page_size); ++i) {
    if (pages[i] >= 0 && pages[i] < num_pages) continue;
    refuse_value("block_table must hold pages 0 to ", num_pages - 1, ", got ", pages[i], " at (", b,
                 ", ", i, ")");
  }
}

// Keys of sequence b that count, as every backend takes them: cut to what there is.
int64_t keys_of(const FwdArgs& a, const Sizes& s, int64_t b) {
  const int64_t all = slot(a.cu_seqlens_k, s.seqlen_kv, b);
  if (!a.seqused_k.given()) return all;
  return std::min(std::max(int64_t{a.seqused_k.as<int>()[b]}, int64_t{0}), all);
}

}  // namespace

void check_places(const FwdArgs& a, const Sizes& s) {
  check_cu_seqlens_values(a.cu_seqlens_q, s.total_q);
  check_cu_seqlens_values(a.cu_seqlens_k, s.total_kv);
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t length = keys_of(a, s, b);
    const int leftpad = a.leftpad_k.given() ? a.leftpad_k.as<int>()[b] : 0;
    if (leftpad < 0) {
      refuse_value("leftpad_k must be at least 0, got ", leftpad, " for sequence ", b);
    }
    check_cache_row(a.cache_batch_idx, a.k.size(0), b);
    check_pages(a.block_table, leftpad, length, s.page_size, s.num_pages, b);
  }
}

void check_lengths(const FwdArgs& a, const Sizes& s) {
  check_places(a, s);
  check_used(a.seqused_q, a.cu_seqlens_q, s.seqlen_q, s.batch);
  check_used(a.seqused_k, a.cu_seqlens_k, s.seqlen_kv, s.batch);
  for (int64_t b = 0; a.leftpad_k.given() && b < s.batch; ++b) {
    const int pad = a.leftpad_k.as<int>()[b];
    if (pad > keys_of(a, s, b)) {
      refuse_value("leftpad_k must be at most the length of the sequence, ", keys_of(a, s, b),
                   ", got ", pad, " for sequence ", b);
    }
  }
  check_hint(a.cu_seqlens_q, "max_seqlen_q", a.max_seqlen_q);
  check_hint(a.cu_seqlens_k, "max_seqlen_k", a.max_seqlen_k);
}

void check_append_lengths(const KvAppendArgs& a) {
  const bool paged = a.block_table.given();
  const int64_t page_size = a.k_cache.size(1);
  const int64_t capacity = paged ? page_size * a.block_table.size(1) : page_size;
  for (int64_t b = 0; b < a.k.size(0); ++b) {
    const int64_t length = a.cache_seqlens.as<int>()[b], end = length + a.k.size(1);
    if (length < 0 || end > capacity) {
      refuse_value("cache_seqlens must leave room for ", a.k.size(1), " new keys in a cache of ",
                   capacity, ", got ", length, " for sequence ", b);
    }
    check_cache_row(a.cache_batch_idx, a.k_cache.size(0), b);
    check_pages(a.block_table, length, end, page_size, a.k_cache.size(0), b);
    if (a.rotary_cos.given() && end > a.rotary_cos.size(0)) {
      refuse_value("rotary_cos must have a row for each position, ", end, " of them, got ",
                   shape_text(a.rotary_cos), " for sequence ", b);
    }
  }
}

bool debug_mode() {
  const char* value = std::getenv("FLASH_CUDA_DEBUG");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace flash_cuda
