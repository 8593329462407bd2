// Online softmax in base 2, on any fragment: p = exp2(s * scale_log2 - ref).
//
// A row keeps a reference instead of its maximum. `step_exact` raises it to the running maximum.
// Leaving it alone takes the maximum, its shuffles and the rescaling off the critical path; since
// fp32 is scale-free this costs no accuracy as long as the sum of a block stays under kStaleLimit.
// A block above it starts again, with its exact maximum.
#pragma once

#include "common/fragment.cuh"
#include "common/log2.h"
#include "common/params.h"
#include "ptx/math.h"

namespace flash_cuda {

constexpr float kFloatMax = 3.402823466e38f;

// Largest sum of a lane's probabilities in one block that may stay: every probability then
// fits the 16-bit type (65,504 for float16), and the accumulators keep a wide margin.
template <DType kDType>
constexpr float kStaleLimit = kDType == DType::kFloat16 ? 16384.0f : 1.1529215e18f;  // 2^14, 2^60

// State of the two rows that a lane shares with its quad in one MmaFragment.
struct SoftmaxRows {
  float ref[2];  // base-2 exponent of the reference, -inf until the row has met a key
  float sum[2];  // of this lane's columns, relative to ref

  __device__ __forceinline__ void reset() {
    ref[0] = ref[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
  __device__ __forceinline__ bool settled() const {
    return ref[0] != -INFINITY && ref[1] != -INFINITY;
  }

  // Scores to probabilities with the exact running maximum; `rescale` is for the output rows.
  template <class Fragment>
  __device__ __forceinline__ void step_exact(Fragment& s, float scale_log2, float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = s.at(r, 0);
#pragma unroll
      for (int c = 1; c < Fragment::kCols; ++c) m = fmaxf(m, s.at(r, c));
      // Clamped so that a maximum near the end of the fp32 range leaves no inf - inf.
      m = fmaxf(ref[r], fminf(quad_max(m) * scale_log2, kFloatMax));
      const float base = m == -INFINITY ? 0.0f : m;
      rescale[r] = ptx::ex2(ref[r] - base);
      ref[r] = m;
      float block_sum = 0.0f;
#pragma unroll
      for (int c = 0; c < Fragment::kCols; ++c) {
        // Product and difference are rounded apart: the maximum then gives exactly 1, however
        // large the logits are.
        const float p = ptx::ex2(__fadd_rn(__fmul_rn(s.at(r, c), scale_log2), -base));
        s.at(r, c) = p;
        block_sum += p;
      }
      sum[r] = fmaf(sum[r], rescale[r], block_sum);
    }
  }

  // Sums over the quad. Returns 1 / sum for each row (0 for a row without keys) and its
  // log-sum-exp (-inf). `extra` is one more logit, of a value that is zero; -inf: none.
  __device__ __forceinline__ void finalize(float (&inverse)[2], float (&lse)[2],
                                           float extra = -INFINITY) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = quad_sum(sum[r]);
      if (extra != -INFINITY) {
        const float base = fmaxf(ref[r], extra * kLog2e);
        const float shrink = ptx::ex2(ref[r] - base);
        total = total * shrink + ptx::ex2(extra * kLog2e - base);
        inverse[r] = shrink / total;
        lse[r] = base * kLn2 + logf(total);
      } else {
        inverse[r] = total > 0.0f ? 1.0f / total : (total == total ? 0.0f : total);
        lse[r] = ref[r] == -INFINITY ? -INFINITY : ref[r] * kLn2 + logf(total);
      }
    }
  }
};

// Scores outside the interval of their row become -inf.
template <class Fragment, class Interval>
__device__ __forceinline__ void apply_mask(Fragment& s, int lane, int col0, Interval interval_of) {
#pragma unroll
  for (int r = 0; r < Fragment::kRows; ++r) {
    int begin, end;
    interval_of(Fragment::row(lane, r), begin, end);
    begin -= col0 + Fragment::col(lane, 0);
    end -= col0 + Fragment::col(lane, 0);
#pragma unroll
    for (int c = 0; c < Fragment::kCols; ++c) {
      const int col = Fragment::col(0, c);  // constant, relative to the lane's first column
      if (col < begin || col >= end) s.at(r, c) = -INFINITY;
    }
  }
}

}  // namespace flash_cuda
