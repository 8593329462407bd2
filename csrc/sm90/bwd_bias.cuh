// The bias of transposed scores and its gradient.
//
// A thread holds the scores of two keys, `key` and key + 8, and of two of every eight queries, from
// `q` on. Eight lanes read or write neighbouring keys of a query: a sector of 32-bit numbers.
#pragma once

#include "common/mask.h"
#include "common/params.h"
#include "ptx/convert.h"
#include "ptx/opaque.h"

namespace flash_cuda::sm90 {

// Calls visit(index of a score, address) for every score inside the sequences. The address goes
// from row to row, by one addition: as many addresses as scores would not fit into registers.
template <int kScores, class T, class Visit>
__device__ __forceinline__ void visit_scores(T* at, int64_t row_stride, int64_t col_stride,
                                             const Mask& mask, int q, int key, const Visit& visit) {
  at += q * row_stride + key * col_stride;
  const int rows = mask.seqlen_q - q;
  const bool first = key < mask.seqlen_kv, second = key + 8 < mask.seqlen_kv;
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool inside = 8 * j + e < rows;
      if (inside && first) visit(4 * j + e, at);
      if (inside && second) visit(4 * j + e + 2, at + 8 * col_stride);
      at += (e == 0 ? 1 : 7) * row_stride;
      ptx::make_opaque(at);
    }
  }
}

template <DType kDType, int kScores>
__device__ __forceinline__ void add_bias(float (&s)[kScores], const FwdParams& p, const Mask& mask,
                                         int batch, int head, int q, int key) {
  const int64_t first = batch * p.bias_batch_stride + head * p.bias_head_stride;
  if (p.bias_dtype == DType::kFloat32) {
    visit_scores<kScores>(static_cast<const float*>(p.bias) + first, p.bias_row_stride,
                          p.bias_col_stride, mask, q, key,
                          [&](int i, const float* at) { s[i] += *at; });
  } else {
    visit_scores<kScores>(static_cast<const uint16_t*>(p.bias) + first, p.bias_row_stride,
                          p.bias_col_stride, mask, q, key,
                          [&](int i, const uint16_t* at) { s[i] += ptx::to_float<kDType>(*at); });
  }
}

// The first element of a head's gradient; of a bias with one row for all queries, of the row that a
// block of queries has, `block_row` further.
__device__ __forceinline__ float* dbias_of(const BwdParams& params, int64_t block_row, int batch,
                                           int head) {
  return params.dbias + batch * params.dbias_batch_stride + head * params.dbias_head_stride +
         block_row;
}

// dS of a thread's two keys, summed over its queries; those past the sequence have none.
template <int kScores>
__device__ __forceinline__ float2 sum_of_keys(const float (&ds)[kScores]) {
  float2 sums = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    sums.x += ds[4 * j] + ds[4 * j + 1];
    sums.y += ds[4 * j + 2] + ds[4 * j + 3];
  }
  return sums;
}

// Of a bias with one row for all queries: those of a block, or of many, count as one.
__device__ __forceinline__ void add_dbias_of_keys(float2 sums, float* base, int64_t col_stride,
                                                  const Mask& mask, int key) {
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
    sums.x += __shfl_xor_sync(0xffffffff, sums.x, lanes);
    sums.y += __shfl_xor_sync(0xffffffff, sums.y, lanes);
  }
  if (threadIdx.x % 4 != 0) return;
  if (key < mask.seqlen_kv) atomicAdd(base + key * col_stride, sums.x);
  if (key + 8 < mask.seqlen_kv) atomicAdd(base + (key + 8) * col_stride, sums.y);
}

// Adds dS to the gradient of the bias. One writer an element unless several scores share it. Of a
// bias with one row for all queries there is one writer, too, if every block has a row of its own.
template <int kScores>
__device__ __forceinline__ void add_dbias(const float (&ds)[kScores], const BwdParams& params,
                                          int64_t block_row, const Mask& mask, int batch, int head,
                                          int q, int key) {
  float* const base = dbias_of(params, block_row, batch, head);
  const int64_t row = params.dbias_row_stride, col = params.dbias_col_stride;
  if (row == 0) {
    // A key at a time, which takes the fewer registers.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0.0f;  // queries past the sequence have none
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) sum += ds[4 * j + 2 * r] + ds[4 * j + 2 * r + 1];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      if (key + 8 * r < mask.seqlen_kv && threadIdx.x % 4 == 0) {
        atomicAdd(base + (key + 8 * r) * col, sum);
      }
    }
  } else if (params.dbias_shared) {
    visit_scores<kScores>(base, row, col, mask, q, key,
                          [&](int i, float* at) { atomicAdd(at, ds[i]); });
  } else {
    visit_scores<kScores>(base, row, col, mask, q, key, [&](int i, float* at) { *at = ds[i]; });
  }
}

}  // namespace flash_cuda::sm90
