// Online softmax over wgmma accumulators, two rows a thread.
//
// Register s[4 j + e] of a lane is row (e / 2) * 8 + lane / 4 and column 8 j + 2 (lane % 4) + e % 2
// of the warp's 16 rows. References and sums are per row; sums are per thread until the end.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/fragment.cuh"
#include "common/log2.h"
#include "common/mask.h"
#include "ptx/math.h"

namespace flash_cuda::sm90 {

struct SoftmaxRows {
  float reference[2];  // what is subtracted from the scaled scores; log2 units, or natural ones
  float sum[2];        // of this thread's columns

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  }
};

// Of a lane's columns (two in every eight), those below `end`: bit 2 j + e is column 8 j + e.
template <int kColumns>
__device__ __forceinline__ uint32_t columns_below(int end) {
  static_assert(kColumns <= 128, "a bit for every column of a lane");
  const int x = min(max(end, 0), kColumns);
  return static_cast<uint32_t>((uint64_t{1} << (x / 8 * 2 + min(x % 8, 2))) - 1);
}

// Scores outside the keys that a row sees become -inf. `first_key` is the key of this lane's
// column 0, `first_row` its first row.
template <bool kMayChunk = true, int kN>
__device__ __forceinline__ void mask_scores(float (&s)[kN], const Mask& mask, int first_row,
                                            int first_key) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Rows past the end are like the last one: they stay out of the way of the fast path.
    const int row = min(first_row + 8 * r, mask.seqlen_q - 1);
    uint32_t seen;
    if constexpr (kMayChunk) {
      seen = columns_below<2 * kN>(mask.kv_end(row) - first_key) &
             ~columns_below<2 * kN>(mask.kv_begin(row) - first_key);
    } else {
      const int pos = row + mask.offset;
      seen = columns_below<2 * kN>(min(mask.seqlen_kv, pos + 1 + mask.window_right) - first_key);
      if (mask.window_left < kUnbounded) {
        seen &= ~columns_below<2 * kN>(pos - mask.window_left - first_key);
      }
    }
#pragma unroll
    for (int j = 0; j < kN / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(seen & (1u << (2 * j + e)))) s[4 * j + 2 * r + e] = -INFINITY;
      }
    }
  }
}

// s becomes exp2(s * scale - reference), or, in natural units, exp(s - reference); adds the rows'
// sums, or begins them (kNewSums). In natural units the difference is formed first: a row's largest
// logit gives 1, however large it is, and a finite logit stays finite.
template <bool kNatural = false, bool kNewSums = false, int kN>
__device__ __forceinline__ void exponentials(float (&s)[kN], float scale, float ref0, float ref1,
                                             float& sum0, float& sum1) {
#pragma unroll
  for (int j = 0; j < kN / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float ref = e < 2 ? ref0 : ref1;
      s[4 * j + e] =
          ptx::ex2(kNatural ? (s[4 * j + e] - ref) * kLog2e : fmaf(s[4 * j + e], scale, -ref));
    }
    if (kNewSums && j == 0) {
      sum0 = s[0] + s[1];
      sum1 = s[2] + s[3];
    } else {
      sum0 += s[4 * j] + s[4 * j + 1];
      sum1 += s[4 * j + 2] + s[4 * j + 3];
    }
  }
}

// Scaled maximum of the block and of what was seen before, per row.
template <int kN>
__device__ __forceinline__ void row_maxima(const float (&s)[kN], float scale,
                                           const SoftmaxRows& rows, float (&maxima)[2]) {
  float m0 = s[0], m1 = s[2];
#pragma unroll
  for (int j = 0; j < kN / 4; ++j) {
    m0 = fmaxf(m0, fmaxf(s[4 * j], s[4 * j + 1]));
    m1 = fmaxf(m1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
  maxima[0] = fmaxf(rows.reference[0], quad_max(m0) * scale);
  maxima[1] = fmaxf(rows.reference[1], quad_max(m1) * scale);
}

// Scores beyond this are rounded before the reference, a rounded one, is subtracted: what a fused
// multiply-add leaves of a maximum's own product could be any exponent.
constexpr float kFusedBelow = 0x1p20f;

// One block of exact online softmax; o is to be multiplied by `rescale` afterwards.
template <bool kNatural = false, int kN>
__device__ __forceinline__ void softmax_exact(float (&s)[kN], float scale, SoftmaxRows& rows,
                                              float (&rescale)[2]) {
  float maxima[2];
  row_maxima(s, scale, rows, maxima);
  // A row without keys so far has maximum -inf: subtract 0, so that its terms are exp2(-inf) = 0.
  const float ref0 = maxima[0] == -INFINITY ? 0.f : maxima[0];
  const float ref1 = maxima[1] == -INFINITY ? 0.f : maxima[1];
  constexpr float kUnit = kNatural ? kLog2e : 1.0f;
  rescale[0] = ptx::ex2((rows.reference[0] - ref0) * kUnit);
  rescale[1] = ptx::ex2((rows.reference[1] - ref1) * kUnit);
  rows.reference[0] = maxima[0];
  rows.reference[1] = maxima[1];
  if constexpr (!kNatural) {
    if (__any_sync(~0u, fmaxf(fabsf(ref0), fabsf(ref1)) > kFusedBelow)) {
#pragma unroll
      for (int i = 0; i < kN; ++i) s[i] = __fmul_rn(s[i], scale);
      scale = 1.0f;
    }
  }
  float sum0 = 0.f, sum1 = 0.f;
  exponentials<kNatural>(s, scale, ref0, ref1, sum0, sum1);
  rows.sum[0] = fmaf(rows.sum[0], rescale[0], sum0);
  rows.sum[1] = fmaf(rows.sum[1], rescale[1], sum1);
}

// Only the first half of it, up to the exponentials: references become the maxima of the block and
// of what was before, and the sums follow. False, and nothing is done, where they are too large for
// a fused multiply-add.
template <int kN>
__device__ __forceinline__ bool raise_references(const float (&s)[kN], float scale,
                                                 SoftmaxRows& rows, float (&rescale)[2]) {
  float maxima[2];
  row_maxima(s, scale, rows, maxima);
  if (__any_sync(~0u, !(fmaxf(fabsf(maxima[0]), fabsf(maxima[1])) <= kFusedBelow))) return false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rescale[r] = ptx::ex2(rows.reference[r] - maxima[r]);
    rows.reference[r] = maxima[r];
    rows.sum[r] *= rescale[r];
  }
  return true;
}

// Where the product of a reference and log2(e) is rounded apart from that of a logit, their
// difference is exact enough for references up to this.
constexpr float kFoldedBelow = 0x1p12f;

// One block of logits in natural units. A row keeps its reference until a logit rises more than
// `rise` above it. Returns whether one did, so that o is to be multiplied.
template <int kN>
__device__ __forceinline__ bool softmax_lazy(float (&s)[kN], float rise, SoftmaxRows& rows,
                                             float (&rescale)[2]) {
  // Of this thread's columns: the others of the quad look at theirs.
  float m0 = s[0], m1 = s[2];
#pragma unroll
  for (int j = 0; j < kN / 4; ++j) {
    m0 = fmaxf(m0, fmaxf(s[4 * j], s[4 * j + 1]));
    m1 = fmaxf(m1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
  // The reference of a row without keys so far is -inf.
  const bool risen = m0 > rows.reference[0] + rise || m1 > rows.reference[1] + rise ||
                     fmaxf(fabsf(rows.reference[0]), fabsf(rows.reference[1])) > kFoldedBelow;
  if (__any_sync(~0u, risen)) {
    softmax_exact<true>(s, 1.0f, rows, rescale);
    return true;
  }
  float sum0 = 0.f, sum1 = 0.f;
  exponentials(s, kLog2e, rows.reference[0] * kLog2e, rows.reference[1] * kLog2e, sum0, sum1);
  rows.sum[0] += sum0;
  rows.sum[1] += sum1;
  return false;
}

// What a row's sum says at the end: what to multiply O with, and the natural log of the sum.
struct RowEnd {
  float factor, lse;
};

// The sink is one more logit, without a value.
template <bool kNatural>
__device__ __forceinline__ RowEnd row_end(float reference, float sum, float sink) {
  const float log_keys =
      kNatural ? fmaf(ptx::lg2(sum), kLn2, reference) : (reference + ptx::lg2(sum)) * kLn2;
  if (sink == -INFINITY) {
    return {sum == 0.f ? 0.f : __fdividef(1.f, sum), sum == 0.f ? -INFINITY : log_keys};
  }
  if (sum == 0.f) return {0.f, sink};
  const float larger = fmaxf(log_keys, sink);
  const float share = ptx::ex2((log_keys - larger) * kLog2e);
  const float total = share + ptx::ex2((sink - larger) * kLog2e);
  return {__fdividef(share, total) * __fdividef(1.f, sum), fmaf(ptx::lg2(total), kLn2, larger)};
}

template <int kN>
__device__ __forceinline__ void scale_rows(float (&d)[kN], float factor0, float factor1) {
#pragma unroll
  for (int i = 0; i < kN; ++i) d[i] *= (i & 2) ? factor1 : factor0;
}

}  // namespace flash_cuda::sm90
