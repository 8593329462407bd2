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

}  // namespace flash_cuda
