// The warpgroup of the probabilities: S, P, dV and its columns of dQ.
#pragma once

#include "sm90/bwd_wide_consumer.cuh"

namespace flash_cuda::sm90 {

// kGeneral: with softcap, or with ALiBi and a bias.
template <class Tile, DType kDType, bool kGeneral, WideSharing kSharing>
struct BwdWideScores : BwdWideWarpgroup<Tile, kDType, 0, kSharing> {
  using Base = BwdWideWarpgroup<Tile, kDType, 0, kSharing>;
  using Smem = typename Base::Smem;
  using Base::args, Base::task, Base::smem, Base::rank, Base::thread;
  using Base::bars, Base::lane, Base::warp, Base::kScores, Base::kDq, Base::kBias;

  float dv[Tile::kHeadDimV / 2], scores[kScores];
  uint32_t p16[kScores / 8][4];    // A operand of dV, one row a k-step
  uint32_t p_out[kScores / 8][4];  // float16, for dS
  float2 lse[kScores / 4];

  // Columns (queries) outside a key's interval get -inf.
  __device__ void mask_scores(int q0) {
    const int col = q0 + 2 * (lane() % 4);
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int kv = this->key() + 8 * r;
      begin[r] = task->mask.q_begin(kv) - col;
      end[r] = kv < task->mask.seqlen_kv ? task->mask.q_end(kv) - col : begin[r];
    }
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int q = 8 * j + e % 2;
        if (q < begin[e / 2] || q >= end[e / 2]) scores[4 * j + e] = args.base.masked_score;
      }
    }
  }

  // tanh with an absolute error of about 1e-7, in two approximate instructions.
  __device__ static float tanh_of(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + ptx::ex2(x * 2.8853900817779268f));
  }

  // General variant: products to scores, see BwdArgs.
  __device__ void modify_scores(int q0, int group) {
    const FwdParams& p = args.base.params.fwd;
    if (p.softcap != 0.0f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = tanh_of(scores[i] * args.base.to_score);
      return;
    }
    const int q = q0 + 2 * (lane() % 4), key = this->key();
    const int head = task->first_q_head() + group;
    if (p.alibi_slopes) {
      const float slope = p.alibi_slopes[task->sequence * p.alibi_batch_stride + head];
      const int distance = q + task->mask.offset - key;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float away = fabsf(static_cast<float>(distance + 8 * j + e % 2 - 8 * (e / 2)));
          scores[4 * j + e] = fmaf(-slope, away, scores[4 * j + e] * args.base.to_score);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] *= args.base.to_score;
    }
    if (p.bias) add_bias<kDType>(scores, p, task->mask, task->sequence, head, q, key);
  }

  // With a tile of bias, or one `of_keys`: products to scores.
  __device__ void add_bias_tile(int step, int q0, int group, float2 of_keys) {
    const BwdBiasPart<kDType> part = this->bias_part(q0, group);
    const auto add = [&](int j, const float (&b)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[4 * j + e] = fmaf(scores[4 * j + e], args.base.to_score, b[e]);
      }
    };
    if (this->bias_tiles()) {
      ptx::mbarrier_wait(bars().bias_full(), step & 1);
      part.for_tile(add);
    } else {
      part.for_keys(of_keys, add);
    }
    if (!args.base.params.fwd.alibi_slopes) return;
    const float slope = part.slope();
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = fmaf(-slope, part.away(i), scores[i]);
  }

  // P^T = exp2(S^T * scale_log2 - lse2), twice in 16 bits: for dV, and as float16 for dS. With a
  // cap the derivative of tanh joins the latter.
  __device__ void probabilities() {
    const float scale = args.base.scale_log2;
    const float capped = kGeneral && args.base.params.fwd.softcap != 0.0f ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      float* s = scores + 4 * j;
      // A masked score is -inf and has no slope to tell from.
      const float tanhs[4] = {fmaxf(s[0], -1.0f), fmaxf(s[1], -1.0f), fmaxf(s[2], -1.0f),
                              fmaxf(s[3], -1.0f)};
      s[0] = ptx::ex2(fmaf(s[0], scale, -lse[j].x));
      s[1] = ptx::ex2(fmaf(s[1], scale, -lse[j].y));
      s[2] = ptx::ex2(fmaf(s[2], scale, -lse[j].x));
      s[3] = ptx::ex2(fmaf(s[3], scale, -lse[j].y));
      p16[j / 2][j % 2 * 2] = ptx::pack<kDType>(s[0], s[1]);
      p16[j / 2][j % 2 * 2 + 1] = ptx::pack<kDType>(s[2], s[3]);
      if constexpr (kGeneral) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] *= fmaf(-capped * tanhs[e], tanhs[e], 1.0f);
      }
      p_out[j / 2][j % 2 * 2] = ptx::pack<DType::kFloat16>(s[0], s[1]);
      p_out[j / 2][j % 2 * 2 + 1] = ptx::pack<DType::kFloat16>(s[2], s[3]);
    }
  }

  __device__ void issue_scores(int step) {
    const RingStep<Tile::kQStages> q(step);
    ptx::mbarrier_wait(bars().q_full(q.stage), q.phase);
    ptx::wgmma_fence();
    this->template gemm_scores<Tile::kHeadDim, true>(scores, Smem::kK,
                                                     smem + Smem::kQ + q.stage * Smem::kTileBytes);
    ptx::wgmma_commit_group();
  }

  // Read while the GEMM runs: there is no room for them beside the operands of the one before.
  __device__ void load_lse(int step) {
    const uint32_t values = smem + Smem::kLse + (step & 1) * Smem::kRowBytes + lane() % 4 * 8;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 v = ptx::load_shared_f32x2(values + 32 * j);
      lse[j] = {v.x - kProbExponent, v.y - kProbExponent};
    }
  }

  __device__ void finish_scores(int step, int q0, int group, bool masked) {
    float2 of_keys{};
    if constexpr (kBias) of_keys = this->bias_part(q0, group).key_bias();
    load_lse(step);
    ptx::wgmma_wait_group<0>();
    ptx::pin(scores);
    this->release(bars().q_empty(step & 1));
    if constexpr (kBias) {
      add_bias_tile(step, q0, group, of_keys);
    } else if constexpr (kGeneral) {
      modify_scores(q0, group);
    }
    if (masked) {
      mask_scores(q0);
      __syncwarp();
    }
    probabilities();
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Tile::kHeadDimV / 2; ++i) dv[i] = 0.0f;
  }

  // P to the other warpgroup, once dS of the step before has been used in both blocks.
  __device__ void send_p(int step) {
    ptx::mbarrier_wait(bars().ds_empty(), (step & 1) ^ 1);
#pragma unroll
    for (int k = 0; k < kScores / 8; ++k) {
      ptx::store_shared_16(this->warp_ds() + k * 512 + lane() * 16, p_out[k]);
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(bars().p_full());
  }

  // dV and dQ of a step, and S and P of the next one (kMore), of Q block q0.
  template <bool kMore>
  __device__ void step(int step, int q0, int group, bool masked) {
    const RingStep<Tile::kDoutStages> dout(step);
    ptx::mbarrier_wait(bars().dout_full(dout.stage), dout.phase);
    ptx::pin(dv);
    Base::pin_operand(p16);
    ptx::wgmma_fence();
    this->template gemm_out<Tile::kHeadDimV>(dv, p16,
                                             smem + Smem::kDout + dout.stage * Smem::kTileBytesV);
    ptx::wgmma_commit_group();
    if constexpr (kMore) {
      issue_scores(step + 1);
      ptx::wgmma_wait_group<1>();
    } else {
      ptx::wgmma_wait_group<0>();
    }
    ptx::pin(dv);
    Base::pin_operand(p16);
    this->release(bars().dout_empty(dout.stage));
    if constexpr (kMore) finish_scores(step + 1, q0, group, masked);

    float dq[kDq];
    const uint32_t here = this->block_rank();
    ptx::mbarrier_wait(bars().ds_full(), step & 1);
    ptx::wgmma_fence();
    this->gemm_dq(dq, here);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin(dq);
    this->release(bars().ds_empty());
    if constexpr (kMore) send_p(step + 1);
    this->template stage_dq<kMore>(dq, step);
  }

  // A task's steps, of which there is at least one; `i` counts on through the tasks.
  __device__ void accumulate(int& i) {
    const int full_begin = task->blocks.full_begin, full_end = task->blocks.full_end;
    BwdSteps at(*task);
    const auto masked = [&] { return at.q_block < full_begin || at.q_block >= full_end; };
    if (this->bias_tiles()) {  // of the first step: the staging buffer is free
      this->wait_staging();
      this->hand_to_store(i);
    }
    issue_scores(i);
    finish_scores(i, at.q_block * Tile::kBlockQ, 0, masked());
    if (this->bias_tiles()) this->hand_to_store(i);
    send_p(i);
    clear();  // not before: the scores take its place
#pragma unroll 1
    for (at.next(); at.left > 0; at.next(), ++i) {
      step<true>(i, at.q_block * Tile::kBlockQ, at.group, masked());
    }
    step<false>(i++, 0, 0, false);
  }

  __device__ void run(uint8_t* smem_ptr) {
    int i = 0;
    const auto work = [&](bool steps) {
      if (steps) {
        accumulate(i);
      } else {
        clear();
      }
    };
    const auto out = [&] {
      if (!args.base.params.dv) return;
      if constexpr (kSharing != WideSharing::kNone) this->join(dv);
      this->template stage_out<Tile::kHeadDimV>(dv, kProbScale);
    };
    this->for_tasks(smem_ptr, work, out);
  }
};

}  // namespace flash_cuda::sm90
