// The address of key row j of one sequence and head: dense, packed, cached or paged.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "common/seqlen.h"

namespace flash_cuda {

// kMayBePaged compiles page tables in, as a run-time branch.
template <bool kMayBePaged>
struct KvView {
  const char* base;  // element 0 of the head (of the sequence's first row where not paged)
  int64_t row_bytes;
  const int* pages;  // this sequence's row of the block table, or null; the rest is for pages
  int64_t page_bytes;
  int page_size, first_row;

  // `element_bytes` is the size of one element of the tensor.
  __device__ __forceinline__ static KvView make(const FwdParams& p, const void* tensor,
                                                const Stride& stride, const SeqInfo& seq, int batch,
                                                int kv_head, int element_bytes) {
    KvView v{};
    v.row_bytes = stride.row * element_bytes;
    const char* head = static_cast<const char*>(tensor) + kv_head * stride.head * element_bytes;
    if constexpr (kMayBePaged) {
      if (p.block_table) {
        v.page_bytes = stride.batch * element_bytes;
        v.page_size = p.page_size;
        v.first_row = seq.kv_row0;
        v.pages = p.block_table + batch * p.block_table_stride;
        v.base = head;
        return v;
      }
    }
    v.base = head + seq.kv_batch * stride.batch * element_bytes + seq.kv_row0 * v.row_bytes;
    return v;
  }

  // Only for rows that count: the tail of a page table may hold anything.
  __device__ __forceinline__ const char* row(int j) const {
    if constexpr (kMayBePaged) {
      if (pages) {
        const int r = first_row + j, page = r / page_size;
        return base + pages[page] * page_bytes + (r - page * page_size) * row_bytes;
      }
    }
    return base + j * row_bytes;
  }
};

// K and V of one sequence and head, for warps whose lanes look up the rows of a step together: lane
// i finds the place of key i, one table entry a key, a step ahead of the load.
struct KvTensor {
  const char* base;  // element 0 of the head (of the sequence's first row where not paged)
  int64_t row_bytes, page_bytes;
};
struct KvPlace {
  int page, row;
};
struct KvPlaces {
  KvTensor k, v;
  const int* pages;                      // this sequence's row of the block table, or null
  int page_size, page_shift, first_row;  // size 2^shift; shift < 0: of another size

  __device__ __forceinline__ static int shift_of(int page_size) {
    return (page_size & (page_size - 1)) == 0 ? __ffs(page_size) - 1 : -1;
  }
  __device__ __forceinline__ static KvPlaces make(const FwdParams& p, const SeqInfo& seq, int batch,
                                                  int kv_head) {
    KvPlaces s;
    s.pages = p.block_table ? p.block_table + batch * p.block_table_stride : nullptr;
    s.page_size = p.page_size;
    s.page_shift = shift_of(p.page_size);
    s.first_row = seq.kv_row0;
    s.k = tensor(p.k, p.k_stride, seq, kv_head, s.pages != nullptr);
    s.v = tensor(p.v, p.v_stride, seq, kv_head, s.pages != nullptr);
    return s;
  }
  // Where key j lies, if it counts: the tail of a page table may hold anything.
  __device__ __forceinline__ KvPlace find(int j, int end) const {
    KvPlace at{0, 0};
    if (pages && j < end) {
      const int r = first_row + j, page = page_shift >= 0 ? r >> page_shift : r / page_size;
      at.row = r - page * page_size;
      at.page = pages[page];
    }
    return at;
  }
  // The place that lane `lane` has found, and the address of that key; `column` stands for t.base.
  __device__ __forceinline__ static KvPlace of_lane(const KvPlace& place, int lane) {
    return {__shfl_sync(0xffffffffu, place.page, lane), __shfl_sync(0xffffffffu, place.row, lane)};
  }
  __device__ __forceinline__ static const char* row(const char* column, const KvTensor& t,
                                                    const KvPlace& place) {
    return column + place.page * t.page_bytes + place.row * t.row_bytes;
  }

 private:
  __device__ __forceinline__ static KvTensor tensor(const void* data, const Stride& stride,
                                                    const SeqInfo& seq, int kv_head, bool paged) {
    constexpr int kBytes = 2;
    KvTensor t;
    t.row_bytes = stride.row * kBytes;
    t.page_bytes = stride.batch * kBytes;
    t.base = static_cast<const char*>(data) + kv_head * stride.head * kBytes;
    if (!paged) t.base += seq.kv_batch * t.page_bytes + seq.kv_row0 * t.row_bytes;
    return t;
  }
};

}  // namespace flash_cuda
