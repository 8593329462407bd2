// Score modifications of the general variant on a block of scores.
//
// Each is a pass of its own over the registers, taken or not by the whole block, so that a call
// pays for what it uses. The layout of the scores is that of mask_scores.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/score_mod.cuh"
#include "ptx/convert.h"
#include "ptx/ldmatrix.h"
#include "ptx/math.h"
#include "ptx/smem_addr.h"

namespace flash_cuda::sm90 {

// Two divisions less than tanhf; the absolute error is about 1e-7 everywhere, which is what
// matters for a logit.
__device__ __forceinline__ float bounded_tanh(float x) {
  return 1.0f - __fdividef(2.0f, ptx::ex2(2.885390081777927f * x) + 1.0f);
}

// tanh(x) up to kSmallTanh, without the unit that computes exponentials; error below 5e-8.
constexpr float kSmallTanh = 0.75f;
__device__ __forceinline__ float small_tanh(float x) {
  const float u = x * x;
  float y = fmaf(u, -0.004482625052332878f, 0.01922057941555977f);
  y = fmaf(u, y, -0.05313996970653534f);
  y = fmaf(u, y, 0.13320353627204895f);
  y = fmaf(u, y, -0.33332449197769165f);
  y = fmaf(u, y, 0.9999998211860657f);
  return x * y;
}

// s = cap * tanh(s * to_cap). kFirst: of a tile's first block, whose code is kept small.
template <bool kFirst, int kN>
__device__ __forceinline__ void cap_scores(float (&s)[kN], float to_cap, float cap) {
  float largest = fabsf(s[0]);
#pragma unroll
  for (int i = 1; i < kN; ++i) largest = fmaxf(largest, fabsf(s[i]));
  // Most blocks are small everywhere.
  if (kFirst || __any_sync(~0u, largest * fabsf(to_cap) > kSmallTanh)) {
#pragma unroll
    for (int i = 0; i < kN; ++i) s[i] = cap * bounded_tanh(s[i] * to_cap);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) s[i] = cap * small_tanh(s[i] * to_cap);
  }
}

// The bias of a warpgroup's block in shared memory: 64 rows of 128 bytes (float32: two panels of
// them) as the copy engine swizzles them, or one row for all queries.
struct BiasSlice {
  uint32_t base;  // 0: the bias is read from global memory
  int warp_row, lane;
  bool one_row;
};

// s = s * scale + bias, 16 bits a key: ldmatrix deals the bias out as wgmma deals out the scores.
template <DType kDType, int kN>
__device__ __forceinline__ void add_slice_16(float (&s)[kN], float scale, const BiasSlice& slice) {
  const int row = slice.warp_row + (slice.lane & 15), half = slice.lane >> 4;
#pragma unroll
  for (int c = 0; c < kN / 8; ++c) {
    uint32_t pairs[4];
    if (slice.one_row) {
      const uint32_t at = slice.base + 32 * c + 4 * (slice.lane & 3);
      pairs[0] = pairs[1] = ptx::load_shared_4(at);
      pairs[2] = pairs[3] = ptx::load_shared_4(at + 16);
    } else {
      ptx::ldmatrix_x4(pairs, slice.base + row * 128 + (((2 * c + half) ^ (row & 7)) << 4));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = ptx::unpack<kDType>(pairs[i]);
      s[8 * c + 2 * i] = fmaf(s[8 * c + 2 * i], scale, bias.x);
      s[8 * c + 2 * i + 1] = fmaf(s[8 * c + 2 * i + 1], scale, bias.y);
    }
  }
}

template <int kN>
__device__ __forceinline__ void add_slice_32(float (&s)[kN], float scale, const BiasSlice& slice) {
  const int group = slice.lane >> 2, quad = slice.lane & 3;
#pragma unroll
  for (int j = 0; j < kN / 4; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = slice.one_row ? 0 : slice.warp_row + group + 8 * r;
      const uint32_t chunk = (2 * (j % 4) + (quad >> 1)) ^ (row & 7);
      const float2 bias = ptx::load_shared_f32x2(slice.base + j / 4 * (64 * 128) + row * 128 +
                                                 (chunk << 4) + (quad & 1) * 8);
      float* pair = s + 4 * j + 2 * r;
      pair[0] = fmaf(pair[0], scale, bias.x);
      pair[1] = fmaf(pair[1], scale, bias.y);
    }
  }
}

// From global memory, with any strides: the loads of a batch come before its first use.
template <DType kBias, int kN>
__device__ __forceinline__ void add_elements(float (&s)[kN], float scale, const ScoreMod& mod,
                                             int first_row, int first_key) {
  using Element = std::conditional_t<kBias == DType::kFloat32, float, uint16_t>;
  const auto* bias = static_cast<const Element*>(mod.bias);
  // Rows and keys past the end take the last one's: they do not count.
  const Element* rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows[r] = bias + min(first_row + 8 * r, mod.seqlen_q - 1) * mod.bias_row_stride;
  }
  // At head dim 256 there are registers for a few at a time.
  constexpr int kBatch = kN > 24 ? kN : 8;
#pragma unroll
  for (int first = 0; first < kN; first += kBatch) {
    Element x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int column = (first + i) / 4 * 8 + i % 2;
      const int key = min(first_key + column, mod.seqlen_kv - 1);
      x[i] = __ldg(rows[i / 2 % 2] + key * mod.bias_col_stride);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float bias;
      if constexpr (kBias == DType::kFloat32) {
        bias = x[i];
      } else {
        bias = ptx::to_float<kBias>(x[i]);
      }
      s[first + i] = fmaf(s[first + i], scale, bias);
    }
  }
}

template <DType kDType, bool kNarrow, int kN>
__device__ __forceinline__ void add_bias(float (&s)[kN], float scale, const ScoreMod& mod,
                                         int first_row, int first_key, const BiasSlice& slice) {
  const bool wide = mod.bias_dtype == DType::kFloat32;
  if constexpr (kNarrow) {
    add_slice_16<kDType>(s, scale, slice);
  } else if (slice.base && !wide) {
    add_slice_16<kDType>(s, scale, slice);
  } else if (slice.base) {
    add_slice_32(s, scale, slice);
  } else if constexpr (kN <= 24) {  // head dim 256 lacks the registers to read many at a time
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const int column = i / 4 * 8 + i % 2, row = (i & 2) * 4;
      s[i] = fmaf(s[i], scale, mod.bias_at(first_row + row, first_key + column));
    }
  } else if (wide) {
    add_elements<DType::kFloat32>(s, scale, mod, first_row, first_key);
  } else {
    add_elements<kDType>(s, scale, mod, first_row, first_key);
  }
}

// Products of Q and K become logits, in natural units.
template <DType kDType, bool kNarrow, bool kFirst, int kN>
__device__ __forceinline__ void modify_scores(float (&s)[kN], const ScoreMod& mod, int first_row,
                                              int first_key, const BiasSlice& slice) {
  float scale = mod.scale;  // what is still to be multiplied
  if (mod.softcap > 0.0f) {
    cap_scores<kFirst>(s, mod.scale / mod.softcap, mod.softcap);
    scale = 1.0f;
  }
  if (mod.alibi_slope != 0.0f) {
    const float distance = static_cast<float>(first_row + mod.offset - first_key);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const int column = i / 4 * 8 + i % 2, row = (i & 2) * 4;
      const float away = fabsf(distance + static_cast<float>(row - column));
      s[i] = fmaf(-mod.alibi_slope, away, s[i] * scale);
    }
    scale = 1.0f;
  }
  if (mod.bias) {
    add_bias<kDType, kNarrow>(s, scale, mod, first_row, first_key, slice);
  } else if (scale != 1.0f) {
#pragma unroll
    for (int i = 0; i < kN; ++i) s[i] *= scale;
  }
}

}  // namespace flash_cuda::sm90
