// From the products of the score GEMMs to probabilities and score gradients, in the registers of a
// thread.
#pragma once

#include "common/log2.h"
#include "common/mask.h"
#include "ptx/convert.h"
#include "ptx/math.h"
#include "sm90/bwd_bias_tile.cuh"
#include "sm90/bwd_smem.cuh"

namespace flash_cuda::sm90 {

// kGeneral: with softcap, or with ALiBi and a bias. Where the tile has room for a bias there are
// ALiBi and a bias, and kGeneral means softcap.
template <class Tile, DType kDType, bool kGeneral>
struct BwdScores {
  static constexpr bool kBias = Tile::kBiasStages > 0;
  static constexpr int kBlockQ = Tile::kBlockQ;
  static constexpr int kScores = kBlockQ / 2;   // S^T and dP^T accumulators a thread
  static constexpr int kSlices = kBlockQ / 16;  // k-steps of dV and dK
  using Smem = BwdSmem<Tile>;

  const BwdArgs& args;
  const BwdMaps& maps;
  const uint32_t smem;
  uint8_t* const smem_ptr;
  const int warpgroup, thread;  // 0 or 1; in the warpgroup

  float scores[kScores], dp[kScores];
  uint32_t p16[kSlices][4],
      ds16[kSlices][4];         // A operands, one row a k-step
  uint32_t slopes[kSlices][4];  // with a bias and a cap: derivatives of tanh, float16

  __device__ static void pin_operand(uint32_t (&a)[kSlices][4]) {
#pragma unroll
    for (int k = 0; k < kSlices; ++k) ptx::pin(a[k]);
  }
  __device__ static int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
  __device__ int lane() const { return thread & 31; }
  __device__ int warp() const { return thread >> 5; }
  // First of the two keys of this thread in the block; the other is 8 further.
  __device__ int key_row() const { return warpgroup * 64 + warp() * 16 + lane() / 4; }

  // Accumulators of dP^T start at -delta of their column.
  __device__ void preset_dp(int stage) {
    const float2* delta =
        reinterpret_cast<const float2*>(smem_ptr + Smem::kDelta + stage * Smem::kRowBytes) +
        lane() % 4;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 d = delta[4 * j];
      dp[4 * j] = dp[4 * j + 2] = d.x;
      dp[4 * j + 1] = dp[4 * j + 3] = d.y;
    }
    ptx::pin(dp);
  }

  __device__ float2 lse_of_column(int stage, int j) const {
    return reinterpret_cast<const float2*>(smem_ptr + Smem::kLse +
                                           stage * Smem::kRowBytes)[4 * j + lane() % 4];
  }

  // Columns (queries) outside a key's interval get -inf.
  __device__ void mask_scores(const Mask& mask, int q0, int kv0) {
    const int key = kv0 + key_row(), col = q0 + 2 * (lane() % 4);
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int kv = key + 8 * r;
      begin[r] = mask.q_begin(kv) - col;
      end[r] = kv < mask.seqlen_kv ? mask.q_end(kv) - col : begin[r];
    }
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int q = 8 * j + e % 2;
        if (q < begin[e / 2] || q >= end[e / 2]) scores[4 * j + e] = args.masked_score;
      }
    }
  }

  // tanh with an absolute error of about 1e-7, in two approximate instructions.
  __device__ static float tanh_of(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + ptx::ex2(x * 2.8853900817779268f));
  }

  // General variant: products to scores, see BwdArgs.
  __device__ void modify_scores(const BwdTask<Tile>& task, int q0, int group) {
    const FwdParams& p = args.params.fwd;
    if (p.softcap != 0.0f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = tanh_of(scores[i] * args.to_score);
      return;
    }
    const int q = q0 + 2 * (lane() % 4), key = task.kv0 + key_row();
    const int head = task.first_q_head() + group;
    if (p.alibi_slopes) {
      const float slope = p.alibi_slopes[task.sequence * p.alibi_batch_stride + head];
      const int distance = q + task.mask.offset - key;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float away = fabsf(static_cast<float>(distance + 8 * j + e % 2 - 8 * (e / 2)));
          scores[4 * j + e] = fmaf(-slope, away, scores[4 * j + e] * args.to_score);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] *= args.to_score;
    }
    if (p.bias) sm90::add_bias<kDType>(scores, p, task.mask, task.sequence, head, q, key);
  }

  // With a tile of bias and no cap: products to scores.
  __device__ void add_bias_tile(const BwdBias<Tile, kDType>& bias) {
    bias.for_each([&](int j, const float (&b)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[4 * j + e] = fmaf(scores[4 * j + e], args.to_score, b[e]);
    });
    if (!args.params.fwd.alibi_slopes) return;
    const float slope = bias.part().slope();
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = fmaf(-slope, bias.part().away(i), scores[i]);
  }

  // With a bias and a cap, of the tanhs: P^T, to p16, and the derivative of tanh.
  __device__ void capped_probabilities(const BwdBias<Tile, kDType>& bias, int stage,
                                       const float2* lse) {
    const float slope = args.params.fwd.alibi_slopes ? bias.part().slope() * kLog2e : 0.0f;
    bias.for_each([&](int j, const float (&b)[4]) {
      const float2 row = Tile::kLseInRegisters ? lse[j] : lse_of_column(stage, j);
      float* s = scores + 4 * j;
      float probability[4], slope_of[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float add =
            fmaf(b[e], kLog2e, fmaf(-slope, bias.part().away(4 * j + e), e % 2 ? -row.y : -row.x));
        probability[e] = ptx::ex2(fmaf(s[e], args.scale_log2, add));
        // A masked score is -inf and has no slope to tell from.
        const float tanh = fmaxf(s[e], -1.0f);
        slope_of[e] = fmaf(-tanh, tanh, 1.0f);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p16[j / 2][j % 2 * 2 + r] = ptx::pack<kDType>(probability[2 * r], probability[2 * r + 1]);
        slopes[j / 2][j % 2 * 2 + r] =
            ptx::pack<DType::kFloat16>(slope_of[2 * r], slope_of[2 * r + 1]);
      }
    });
  }

  // P^T = exp2(S^T * scale_log2 - lse2) of some slices. With a cap the derivative of tanh then
  // joins it, where only dS^T takes it from, so the operand for dV is made before.
  template <int kFrom = 0, int kTo = kSlices>
  __device__ void probabilities(float scale_log2, int stage, const float2* lse) {
    const float capped = !kBias && args.params.fwd.softcap != 0.0f ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 2 * kFrom; j < 2 * kTo; ++j) {
      const float2 l = Tile::kLseInRegisters ? lse[j] : lse_of_column(stage, j);
      float* s = scores + 4 * j;
      // A masked score is -inf and has no slope to tell from.
      const float tanhs[4] = {fmaxf(s[0], -1.0f), fmaxf(s[1], -1.0f), fmaxf(s[2], -1.0f),
                              fmaxf(s[3], -1.0f)};
      s[0] = ptx::ex2(fmaf(s[0], scale_log2, -l.x));
      s[1] = ptx::ex2(fmaf(s[1], scale_log2, -l.y));
      s[2] = ptx::ex2(fmaf(s[2], scale_log2, -l.x));
      s[3] = ptx::ex2(fmaf(s[3], scale_log2, -l.y));
      if constexpr (kBias) {
        pack_probabilities(j);
      } else if constexpr (kGeneral) {
        pack_probabilities(j);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] *= fmaf(-capped * tanhs[e], tanhs[e], 1.0f);
      }
    }
  }

  __device__ void pack_probabilities(int j) {
    const float* s = scores + 4 * j;
    p16[j / 2][j % 2 * 2] = ptx::pack<kDType>(s[0], s[1]);
    p16[j / 2][j % 2 * 2 + 1] = ptx::pack<kDType>(s[2], s[3]);
  }
  template <int kFrom, int kTo>
  __device__ void pack_probabilities() {
#pragma unroll
    for (int j = 2 * kFrom; j < 2 * kTo; ++j) pack_probabilities(j);
  }

  // General variant: dS^T, not rounded, to the gradient of the bias, and P^T := 1.
  __device__ void bias_gradient(const BwdTask<Tile>& task, int q0, int group) {
    if (!args.params.dbias) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i) dp[i] *= scores[i], scores[i] = 1.0f;
    add_dbias(dp, args.params, q0 / kBlockQ * args.dbias_block_stride, task.mask, task.sequence,
              task.first_q_head() + group, q0 + 2 * (lane() % 4), task.kv0 + key_row());
  }

  // With a tile of bias: dS^T. Before it is rounded, or comes to the cap, it is the gradient of the
  // bias.
  __device__ void biased_gradients(const BwdBias<Tile, kDType>& bias) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float2 probability = kGeneral ? ptx::unpack<kDType>(p16[i / 4][i % 4])
                                          : make_float2(scores[2 * i], scores[2 * i + 1]);
      dp[2 * i] *= probability.x;
      dp[2 * i + 1] *= probability.y;
    }
    bias.write(maps, dp);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      float2 d = {dp[2 * i], dp[2 * i + 1]};
      if constexpr (kGeneral) {
        const float2 slope = ptx::unpack<DType::kFloat16>(slopes[i / 4][i % 4]);
        d = {d.x * slope.x, d.y * slope.y};
      }
      ds16[i / 4][i % 4] = ptx::pack<kDType>(d.x, d.y);
    }
  }

  // dS^T = P^T o dP^T, where dP^T already is less delta.
  template <int kFrom = 0, int kTo = kSlices>
  __device__ void score_gradients() {
#pragma unroll
    for (int j = 4 * kFrom; j < 4 * kTo; ++j) {
      ds16[j / 4][j % 4] =
          ptx::pack<kDType>(scores[2 * j] * dp[2 * j], scores[2 * j + 1] * dp[2 * j + 1]);
    }
  }
};

}  // namespace flash_cuda::sm90
