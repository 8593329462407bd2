// The scores of a thread of the backward: masks, what changes them, and the gradient of the bias.
#pragma once

#include "common/mask.h"
#include "common/params.h"
#include "common/score_mod.cuh"
#include "common/softmax.cuh"
#include "ptx/convert.h"
#include "ptx/math.h"

namespace flash_cuda::sm100 {

// kN scores next to each other, from (query, key) on: of one key and some queries (kOfKey), or of
// one query and some keys.
template <bool kOfKey, int kN>
struct ScoreLine {
  uint32_t (&s)[kN];
  const int query, key;

  __device__ __forceinline__ float score(int i) const { return __uint_as_float(s[i]); }

  // What the mask hides becomes -inf.
  __device__ __forceinline__ void hide(const Mask& mask) const {
    int begin, end;
    if constexpr (kOfKey) {
      begin = mask.q_begin(key) - query;
      end = key < mask.seqlen_kv ? mask.q_end(key) - query : 0;
    } else {
      begin = mask.kv_begin(query) - key;
      end = mask.kv_end(query) - key;
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (i < begin || i >= end) s[i] = 0xff800000u;
    }
  }

  // Products become logits, or with a cap their tanh.
  __device__ __forceinline__ void modify(const ScoreMod& mod) const {
    if (mod.softcap > 0.0f) {
      const float to_cap = __fdividef(2.0f * kLog2e * mod.scale, mod.softcap);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        s[i] = __float_as_uint(1.0f - __fdividef(2.0f, ptx::ex2(score(i) * to_cap) + 1.0f));
      }
      return;
    }
    const int distance = query + mod.offset - key;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float away = fabsf(static_cast<float>(kOfKey ? distance + i : distance - i));
      s[i] = __float_as_uint(fmaf(-mod.alibi_slope, away, score(i) * mod.scale));
    }
    if (mod.bias && query < mod.seqlen_q && key < mod.seqlen_kv) {
      const int64_t first = query * mod.bias_row_stride + key * mod.bias_col_stride;
      const int64_t stride = kOfKey ? mod.bias_row_stride : mod.bias_col_stride;
      const int count = kOfKey ? mod.seqlen_q - query : mod.seqlen_kv - key;
      const auto* halves = static_cast<const uint16_t*>(mod.bias) + first;
      switch (mod.bias_dtype) {
        case DType::kFloat32:
          return add_bias(static_cast<const float*>(mod.bias) + first, stride, count,
                          [](float x) { return x; });
        case DType::kFloat16:
          return add_bias(halves, stride, count, ptx::to_float<DType::kFloat16>);
        default:
          return add_bias(halves, stride, count, ptx::to_float<DType::kBFloat16>);
      }
    }
  }
  template <class Element, class ToFloat>
  __device__ __forceinline__ void add_bias(const Element* bias, int64_t stride, int count,
                                           ToFloat to_float) const {
#pragma unroll
    for (int i = 0; i < kN; ++i, bias += stride) {
      if (i < count) s[i] = __float_as_uint(score(i) + to_float(*bias));
    }
  }

  // Here scores are dS: adds them to the gradient of the bias. One writer an element unless the
  // bias is broadcast.
  __device__ __forceinline__ void add_to_dbias(const BwdParams& p, int batch, int head,
                                               int seqlen_q, int seqlen_kv) const {
    static_assert(kOfKey, "the gradient of the bias is added up where keys are lanes");
    if (key >= seqlen_kv) return;
    float* to = p.dbias + batch * p.dbias_batch_stride + head * p.dbias_head_stride +
                query * p.dbias_row_stride + key * p.dbias_col_stride;
#pragma unroll
    for (int i = 0; i < kN; ++i, to += p.dbias_row_stride) {
      if (i >= seqlen_q - query) continue;
      if (p.dbias_shared) {
        atomicAdd(to, score(i));
      } else {
        *to = score(i);
      }
    }
  }
};

// P in pairs, with a cap times its slope, which dS takes from there; x: the tanh. A masked score is
// -inf and has no slope to tell from.
__device__ __forceinline__ float2 with_cap_slope(float2 p, float2 x) {
  const float2 tanh = make_float2(fmaxf(x.x, -1.0f), fmaxf(x.y, -1.0f));
  return make_float2(p.x * fmaf(-tanh.x, tanh.x, 1.0f), p.y * fmaf(-tanh.y, tanh.y, 1.0f));
}

// What scores are multiplied with for the exponential: they may be products, logits or tanh.
template <bool kGeneral>
__device__ __forceinline__ float exponent_factor(const FwdParams& p) {
  if (!kGeneral) return p.softmax_scale * kLog2e;
  return p.softcap > 0.0f ? p.softcap * kLog2e : kLog2e;
}

}  // namespace flash_cuda::sm100
