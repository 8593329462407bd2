// Score modifications of the general variant, as block-uniform run-time branches.
//
// All of them turn the raw product q.k into a logit; without any of them the kernels fold the
// scale into the exponential and none of this is compiled.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/params.h"
#include "ptx/convert.h"

namespace flash_cuda {

constexpr float kLargestBias = 2.3e38f;  // times log2(e) is still a float

// What one (sequence, query head) needs to know.
struct ScoreMod {
  float scale, softcap, alibi_slope;
  int offset;        // query q stands at key position q + offset
  const void* bias;  // element (0, 0) of this batch and head, or null
  DType bias_dtype;
  int64_t bias_row_stride, bias_col_stride;
  int seqlen_q, seqlen_kv;

  __device__ __forceinline__ static ScoreMod make(const FwdParams& p, int batch, int head,
                                                  int seqlen_q, int seqlen_kv) {
    ScoreMod m;
    m.scale = p.softmax_scale;
    m.softcap = p.softcap;
    m.alibi_slope = p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] : 0.0f;
    m.offset = p.top_left ? 0 : seqlen_kv - seqlen_q;
    m.bias = nullptr;
    if (p.bias) {
      const int64_t element = batch * p.bias_batch_stride + head * p.bias_head_stride;
      m.bias =
          static_cast<const char*>(p.bias) + element * (p.bias_dtype == DType::kFloat32 ? 4 : 2);
    }
    m.bias_dtype = p.bias_dtype;
    m.bias_row_stride = p.bias_row_stride;
    m.bias_col_stride = p.bias_col_stride;
    m.seqlen_q = seqlen_q;
    m.seqlen_kv = seqlen_kv;
    return m;
  }

  // Only -inf masks: what is finite stays so when it is multiplied by log2(e), or a row of nothing
  // but the lowest number would count as one without keys.
  __device__ __forceinline__ float bias_at(int q, int kv) const {
    if (q >= seqlen_q || kv >= seqlen_kv) return 0.0f;
    const int64_t i = q * bias_row_stride + kv * bias_col_stride;
    float x;
    if (bias_dtype == DType::kFloat32) {
      x = static_cast<const float*>(bias)[i];
    } else {
      const uint16_t bits = static_cast<const uint16_t*>(bias)[i];
      if (bias_dtype == DType::kFloat16) return ptx::to_float<DType::kFloat16>(bits);
      x = ptx::to_float<DType::kBFloat16>(bits);
    }
    return x == -INFINITY ? x : fmaxf(x, -kLargestBias);
  }

  // softcap and scale only: the part with a derivative with respect to q.k.
  __device__ __forceinline__ float capped(float product) const {
    const float x = product * scale;
    return softcap > 0.0f ? softcap * tanhf(x / softcap) : x;
  }
  // d capped / d (scale * q.k), from the capped value.
  __device__ __forceinline__ float cap_slope(float capped_value) const {
    if (softcap <= 0.0f) return 1.0f;
    const float t = capped_value / softcap;
    return 1.0f - t * t;
  }
  // What is added after the cap.
  __device__ __forceinline__ float added(int q, int kv) const {
    float x = 0.0f;
    if (alibi_slope != 0.0f) x -= alibi_slope * fabsf(static_cast<float>(q + offset - kv));
    if (bias) x += bias_at(q, kv);
    return x;
  }
};

}  // namespace flash_cuda
