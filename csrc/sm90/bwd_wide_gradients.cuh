// The warpgroup of the scores' gradients: dP, dS, dK and its columns of dQ.
#pragma once

#include "sm90/bwd_wide_consumer.cuh"

namespace flash_cuda::sm90 {

// kGeneral: there may be a bias.
template <class Tile, DType kDType, bool kGeneral, WideSharing kSharing>
struct BwdWideGradients : BwdWideWarpgroup<Tile, kDType, 1, kSharing> {
  using Base = BwdWideWarpgroup<Tile, kDType, 1, kSharing>;
  using Smem = typename Base::Smem;
  using Base::args, Base::task, Base::smem, Base::rank, Base::thread;
  using Base::bars, Base::lane, Base::warp, Base::kScores, Base::kDq, Base::kBias;

  float dk[Tile::kHeadDim / 2], dp[kScores];
  float2 key_sums;  // where all queries share one row of bias: dS of the keys, of a query head
  uint32_t ds16[kScores / 8][4];  // A operand of dK, one row a k-step

  // Accumulators of dP^T start at -delta of their column.
  __device__ void preset_dp(int stage) {
    const uint32_t delta = smem + Smem::kDelta + stage * Smem::kRowBytes + lane() % 4 * 8;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 d = ptx::load_shared_f32x2(delta + 32 * j);
      dp[4 * j] = dp[4 * j + 2] = d.x;
      dp[4 * j + 1] = dp[4 * j + 3] = d.y;
    }
    ptx::pin(dp);
  }

  // dS^T = P^T o dP^T, where dP^T already is less delta; also in place of dP^T.
  __device__ void score_gradients() {
#pragma unroll
    for (int k = 0; k < kScores / 8; ++k) {
      uint32_t p[4];
      ptx::load_shared_16(p, this->warp_ds() + k * 512 + lane() * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = ptx::unpack<DType::kFloat16>(p[i]);
        float* d = dp + 8 * k + 2 * i;
        d[0] = v.x * (d[0] * kProbScale);
        d[1] = v.y * (d[1] * kProbScale);
        ds16[k][i] = ptx::pack<kDType>(d[0], d[1]);
      }
    }
  }

  // dS as [key][row], rows contiguous, over the P of the same warp; then a copy for the peer.
  __device__ void store_ds() {
    const int row = lane() % 16;
    __syncwarp();  // P has been read
#pragma unroll
    for (int c = 0; c < Tile::kBlockQ / 16; ++c) {
      const int chunk = c * 2 + lane() / 16;
      ptx::stmatrix_x4(this->warp_ds() + row * 128 + ((chunk ^ (row & 7)) << 4), ds16[c]);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane() == 0) {
      ptx::mbarrier_arrive_expect_tx(bars().ds_full(), 2048);  // the peer's copy of as much
      ptx::bulk_copy_to_peer(this->at_peer(this->warp_ds() + Smem::kDsBytes), this->warp_ds(), 2048,
                             this->at_peer(bars().ds_full()));
    }
  }

  // To the gradient of the bias.
  __device__ void bias_gradient(int q0, int group) const {
    if (!args.base.params.dbias) return;
    add_dbias(dp, args.base.params, q0 / Tile::kBlockQ * args.base.dbias_block_stride, task->mask,
              task->sequence, task->first_q_head() + group, q0 + 2 * (lane() % 4), this->key());
  }

  // The same by way of the staging buffer.
  __device__ void stage_bias_gradient(int step, int q0, int group) {
    const BiasAccess access = args.base.bias_write;
    if (access == BiasAccess::kNone) return;
    if (access == BiasAccess::kKeys) {
      const float2 sums = sum_of_keys(dp);
      key_sums.x += sums.x;
      key_sums.y += sums.y;
      return;
    }
    const BwdBiasPart<kDType> part = this->bias_part(q0, group);
    this->wait_staging();
    part.stage(dp);
    this->hand_to_store(step);
  }

  // Of Q block q0.
  __device__ void step(int step, int q0, int group) {
    const RingStep<Tile::kDoutStages> dout(step);
    const RingStep<Tile::kQStages> q(step);
    ptx::mbarrier_wait(bars().dout_full(dout.stage), dout.phase);
    preset_dp(dout.stage);
    ptx::wgmma_fence();
    this->template gemm_scores<Tile::kHeadDimV, false>(
        dp, Smem::kV, smem + Smem::kDout + dout.stage * Smem::kTileBytesV);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin(dp);
    this->release(bars().dout_empty(dout.stage));

    ptx::mbarrier_wait(bars().p_full(), step & 1);
    score_gradients();
    store_ds();
    ptx::pin(dk);
    Base::pin_operand(ds16);
    ptx::wgmma_fence();
    this->template gemm_out<Tile::kHeadDim>(dk, ds16, smem + Smem::kQ + q.stage * Smem::kTileBytes);
    ptx::wgmma_commit_group();
    if constexpr (kBias) {
      stage_bias_gradient(step, q0, group);
    } else if constexpr (kGeneral) {
      bias_gradient(q0, group);
    }
    float dq[kDq];
    const uint32_t here = this->block_rank();
    ptx::mbarrier_wait(bars().ds_full(), step & 1);
    ptx::wgmma_fence();
    this->gemm_dq(dq, here);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::pin(dk);
    Base::pin_operand(ds16);
    this->release(bars().q_empty(q.stage));
    ptx::wgmma_wait_group<0>();
    ptx::pin(dq);
    this->release(bars().ds_empty());
    this->template stage_dq<false>(dq, step);
  }

  __device__ void run(uint8_t* smem_ptr) {
    int i = 0;
    const auto work = [&](bool) {
#pragma unroll
      for (int n = 0; n < Tile::kHeadDim / 2; ++n) dk[n] = 0.0f;
#pragma unroll 1
      for (BwdSteps at(*task); at.left > 0; at.next()) {
        const int q0 = at.q_block * Tile::kBlockQ, group = at.group;
        if (at.q_block == at.begin) key_sums = {0.0f, 0.0f};
        step(i++, q0, group);
        if constexpr (kBias) {
          const bool last = at.q_block + (at.begin > at.end ? -1 : 1) == at.end;
          if (last && args.base.bias_write == BiasAccess::kKeys) {
            this->bias_part(q0, group).add_to_keys(key_sums, at.q_block);
          }
        }
      }
    };
    const auto out = [&] {
      if (!args.base.params.dk) return;
      if constexpr (kSharing != WideSharing::kNone) this->join(dk);
      this->template stage_out<Tile::kHeadDim>(dk, args.base.params.fwd.softmax_scale);
    };
    this->for_tasks(smem_ptr, work, out);
  }
};

}  // namespace flash_cuda::sm90
