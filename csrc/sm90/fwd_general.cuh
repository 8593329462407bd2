// Score modifications of the general variant on a block of scores.
//
// Each is a pass of its own over the registers, taken or not by the whole block, so that a call
// pays for what it uses.
#pragma once

#include "common/score_mod.cuh"
#include "ptx/math.h"

namespace flash_cuda::sm90 {

// Two divisions less than tanhf; the absolute error is about 1e-7 everywhere, which is what
// matters for a logit.
__device__ __forceinline__ float bounded_tanh(float x) {
  return 1.0f - __fdividef(2.0f, ptx::ex2(2.885390081777927f * x) + 1.0f);
}

// Products of Q and K become logits. The layout is that of mask_scores.
template <int kN>
__device__ __forceinline__ void modify_scores(float (&s)[kN], const ScoreMod& mod, int first_row,
                                              int first_key) {
  if (mod.softcap > 0.0f) {
    const float to_cap = mod.scale / mod.softcap;
#pragma unroll
    for (int i = 0; i < kN; ++i) s[i] = mod.softcap * bounded_tanh(s[i] * to_cap);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) s[i] *= mod.scale;
  }
  if (mod.alibi_slope != 0.0f) {
    const int distance = first_row + mod.offset - first_key;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const int column = i / 4 * 8 + i % 2, row = (i & 2) * 4;
      s[i] -= mod.alibi_slope * fabsf(static_cast<float>(distance + row - column));
    }
  }
  if (mod.bias) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const int column = i / 4 * 8 + i % 2, row = (i & 2) * 4;
      s[i] += mod.bias_at(first_row + row, first_key + column);
    }
  }
}

}  // namespace flash_cuda::sm90
