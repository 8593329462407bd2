// Forward attention with mma.sync and cp.async (Ampere and later).
//
// One thread block computes kBlockQ rows of the output of one head; each warp owns whole rows, so
// no partial output crosses warps. KV blocks are visited from last to first: the ragged end is met
// while the softmax reference is still unset. The loop is staggered by one block: with S = Q K(j)^T
// done, the exponentials of block j run beside the products P V of block j + 1, whose probabilities
// wait in registers. K(j) stays in place until the softmax of its block has been accepted, so that
// the rare block which jumps over the reference can be computed again.
#pragma once

#include "common/dropout.cuh"
#include "common/kv_view.cuh"
#include "common/mask.h"
#include "common/scheduler.cuh"
#include "common/score_mod.cuh"
#include "common/softmax.cuh"
#include "ptx/global.h"
#include "sm80/fwd_tile.h"
#include "sm80/tile_io.cuh"

namespace flash_cuda::sm80 {

template <class Tile, DType kDType, Variant kVariant>
struct FwdBlock {
  static constexpr bool kGeneral = kVariant == Variant::kGeneral;
  using SmemQ = SwizzledTile<Tile::kHeadDim>;  // also K
  using SmemV = SwizzledTile<Tile::kHeadDimV>;
  using Scores = MmaFragment<Tile::kBlockKV>;
  using Output = MmaFragment<Tile::kHeadDimV>;
  static constexpr int kTilesQ = Tile::kTilesQ, kStepsD = Tile::kHeadDim / 16;

  const FwdParams& p;
  const SeqInfo seq;
  const Mask mask;
  const int batch, head, kv_head, q0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t smem_q, smem_k, smem_v;
  KvView<kGeneral> k_view, v_view;
  float scale_log2;
  ScoreMod score_mod;
  Dropout dropout;

  using Operand = uint32_t[kTilesQ][Tile::kBlockKV / 16][4];  // probabilities as left operands

  uint32_t q_regs[Tile::kQInRegs ? kStepsD : 1][kTilesQ][4];
  Output o[kTilesQ];
  SoftmaxRows rows[kTilesQ];

  __device__ FwdBlock(const FwdParams& params, const WorkTile& work, uint32_t smem)
      : p(params),
        seq(seq_info_or_tail(params, work.batch)),
        mask(Mask::make(params, seq.seqlen_q, seq.seqlen_kv)),
        batch(work.batch),
        head(work.head),
        kv_head(work.head / (params.num_heads_q / params.num_heads_kv)),
        q0(work.block * Tile::kBlockQ),
        smem_q(smem),
        smem_k(smem + Tile::kBytesQ),
        smem_v(smem_k + Tile::kStages * Tile::kBytesK) {
    k_view = make_view(p.k, p.k_stride);
    v_view = make_view(p.v, p.v_stride);
    scale_log2 = p.softmax_scale * kLog2e;
    if constexpr (kGeneral) {
      scale_log2 = kLog2e;  // the scores are made logits first
      if (batch < p.batch) {
        score_mod = ScoreMod::make(p, batch, head, seq.seqlen_q, seq.seqlen_kv);
        if (p.dropout_p > 0.0f) dropout = Dropout::make(p, batch, head);
      }
    }
  }

  __device__ KvView<kGeneral> make_view(const void* tensor, const Stride& stride) const {
    return KvView<kGeneral>::make(p, tensor, stride, seq, batch, kv_head, 2);
  }

  // ---- loads: each is one cp.async group of its caller. Addresses are captured by value, since
  // a reference to this object would put all its registers into memory.
  template <int kRows, int kWidth, class RowAddress>
  __device__ void load(uint32_t smem, int rows_valid, int width, const void* tensor,
                       RowAddress row_address) {
    if constexpr (kGeneral) {
      if (p.unaligned) {
        load_rows_unaligned<kRows, kWidth, Tile::kThreads>(smem, rows_valid, width, row_address);
        return;
      }
    }
    load_rows<kRows, kWidth, Tile::kThreads>(smem, rows_valid, width, tensor, row_address);
  }
  template <int kRows, int kWidth>
  __device__ void load_kv(uint32_t smem, const KvView<kGeneral>& view, int kv0, int width,
                          const void* tensor) {
    const int valid = seq.seqlen_kv - kv0;
    if constexpr (kGeneral) {
      load<kRows, kWidth>(smem, valid, width, tensor,
                          [view, kv0](int row) { return view.row(kv0 + row); });
    } else {
      load_tile<kRows, kWidth, Tile::kThreads>(smem, valid, width, tensor, view.row(kv0),
                                               view.row_bytes);
    }
  }
  __device__ void load_q() {
    const char* base = static_cast<const char*>(p.q) +
                       2 * (seq.q_batch * p.q_stride.batch + head * p.q_stride.head +
                            static_cast<int64_t>(seq.q_row0 + q0) * p.q_stride.row);
    load<Tile::kBlockQ, Tile::kHeadDim>(
        smem_q, seq.seqlen_q - q0, p.head_dim, p.q,
        [base, stride = 2 * p.q_stride.row](int row) { return base + row * stride; });
  }
  __device__ void load_k(int kv_block) {
    load_kv<Tile::kBlockKV, Tile::kHeadDim>(k_stage(kv_block), k_view, kv_block * Tile::kBlockKV,
                                            p.head_dim, p.k);
  }
  __device__ void load_v(int kv_block) {
    load_kv<Tile::kBlockKV, Tile::kHeadDimV>(v_stage(kv_block), v_view, kv_block * Tile::kBlockKV,
                                             p.head_dim_v, p.v);
  }
  __device__ uint32_t k_stage(int kv_block) const {
    return smem_k + (kv_block & 1) * Tile::kBytesK;
  }
  __device__ uint32_t v_stage(int kv_block) const {
    return smem_v + (kv_block & 1) * Tile::kBytesV;
  }

  // ---- products
  __device__ uint32_t q_lane_base() const {
    return smem_q + SmemQ::lane_offset(lane) + warp * kTilesQ * 16 * SmemQ::kRowBytes;
  }
  __device__ void load_q_regs() {
    if constexpr (Tile::kQInRegs) {
#pragma unroll
      for (int k = 0; k < kStepsD; ++k) {
#pragma unroll
        for (int m = 0; m < kTilesQ; ++m) load_a_rows_m<SmemQ>(q_regs[k][m], q_lane_base(), m, k);
      }
    }
  }
  __device__ void gemm_qk(Scores (&s)[kTilesQ], int kv_block) {
    const uint32_t q_base = q_lane_base(),
                   k_base = k_stage(kv_block) + SmemQ::lane_offset_crossed(lane);
#pragma unroll
    for (int m = 0; m < kTilesQ; ++m) s[m].clear();
    warp_gemm<kDType, kTilesQ, Tile::kBlockKV, kStepsD>(
        s,
        [&](int k, uint32_t (&a)[kTilesQ][4]) {
#pragma unroll
          for (int m = 0; m < kTilesQ; ++m) {
            if constexpr (Tile::kQInRegs) {
#pragma unroll
              for (int i = 0; i < 4; ++i) a[m][i] = q_regs[k][m][i];
            } else {
              load_a_rows_m<SmemQ>(a[m], q_base, m, k);
            }
          }
        },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_crossed<SmemQ>(b, k_base, k, n); });
  }
  template <class Beside = Nothing>
  __device__ void gemm_pv(const Operand& probabilities, int kv_block, Beside beside = {}) {
    const uint32_t v_base = v_stage(kv_block) + SmemV::lane_offset(lane);
    warp_gemm<kDType, kTilesQ, Tile::kHeadDimV, Tile::kBlockKV / 16>(
        o,
        [&](int k, uint32_t (&a)[kTilesQ][4]) {
#pragma unroll
          for (int m = 0; m < kTilesQ; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[m][i] = probabilities[m][k][i];
          }
        },
        [&](int k, int n, uint32_t (&b)[4]) { load_b_rows_k<SmemV>(b, v_base, k, n); }, beside);
  }

  // ---- scores to probabilities
  __device__ int row0(int m) const { return q0 + (warp * kTilesQ + m) * 16; }

  __device__ void modify_scores(Scores& s, int m, int kv_block) const {
#pragma unroll
    for (int r = 0; r < Scores::kRows; ++r) {
      const int q = row0(m) + Scores::row(lane, r);
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        const int kv = kv_block * Tile::kBlockKV + Scores::col(lane, c);
        s.at(r, c) = score_mod.capped(s.at(r, c)) + score_mod.added(q, kv);
      }
    }
  }
  __device__ void mask_scores(Scores& s, int m, int kv_block) const {
    apply_mask(s, lane, kv_block * Tile::kBlockKV, [&](int row, int& begin, int& end) {
      begin = mask.kv_begin(row0(m) + row);
      end = mask.kv_end(row0(m) + row);
    });
  }
  // Products to probabilities with the exact maximum, for one tile of 16 rows.
  __device__ void softmax_exact(Scores& s, int m, int kv_block, bool masked) {
    if constexpr (kGeneral) modify_scores(s, m, kv_block);
    if (masked) mask_scores(s, m, kv_block);
    float rescale[2];
    rows[m].step_exact(s, scale_log2, rescale);
    scale_output(m, rescale);
  }
  __device__ void scale_output(int m, const float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < Output::kCols; ++c) o[m].at(r, c) *= rescale[r];
    }
  }
  // An interior block: the reference stays, and the sums tell afterwards whether it could. The
  // exponentials run beside the products of the block before it.
  __device__ void softmax_stale(Scores (&s)[kTilesQ], Operand& probabilities, int kv_block) {
    float sums[kTilesQ][2][2];
#pragma unroll
    for (int m = 0; m < kTilesQ; ++m) {
      if constexpr (kGeneral) modify_scores(s[m], m, kv_block);
      sums[m][0][0] = sums[m][0][1] = sums[m][1][0] = sums[m][1][1] = 0.0f;
    }
    constexpr int kPairsN = Tile::kHeadDimV / 16, kValues = 8 * kTilesQ;
    gemm_pv(probabilities, kv_block + 1, [&](auto k, auto n) {
      constexpr int kStep = decltype(k)::value, kPair = decltype(n)::value;
      constexpr int kBegin = kPair * kValues / kPairsN;
      constexpr int kEnd = (kPair + 1) * kValues / kPairsN;
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        const int m = i / 8, t = 2 * kStep + i % 8 / 4, r = i % 4 / 2, c = i % 2;
        float& x = s[m].acc[t][2 * r + c];
        x = ptx::ex2(fmaf(x, scale_log2, -rows[m].ref[r]));
        sums[m][r][c] += x;
      }
      if constexpr (kPair + 1 == kPairsN) {
        if (!kGeneral) pack_step(probabilities, s, kStep);
      }
    });
    bool large = false;
#pragma unroll
    for (int m = 0; m < kTilesQ; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[m][r][0] += sums[m][r][1];
        large |= !(sums[m][r][0] <= kStaleLimit<kDType>);
      }
    }
    if (__any_sync(0xffffffffu, large)) {
      __syncwarp();
      repair(s, probabilities, kv_block);
      __syncwarp();
    } else {
#pragma unroll
      for (int m = 0; m < kTilesQ; ++m) {
        rows[m].sum[0] += sums[m][0][0];
        rows[m].sum[1] += sums[m][1][0];
      }
    }
  }
  __device__ void pack_step(Operand& probabilities, const Scores (&s)[kTilesQ], int k) const {
#pragma unroll
    for (int m = 0; m < kTilesQ; ++m) accumulators_to_a<kDType>(probabilities[m][k], s[m], k);
  }
  __device__ void pack(Operand& probabilities, const Scores (&s)[kTilesQ]) const {
#pragma unroll
    for (int k = 0; k < Tile::kBlockKV / 16; ++k) pack_step(probabilities, s, k);
  }
  // Rare: the block starts again from K, which is still in place.
  __device__ void repair(Scores (&s)[kTilesQ], Operand& probabilities, int kv_block) {
    recompute_qk(s, kv_block);
#pragma unroll
    for (int m = 0; m < kTilesQ; ++m) softmax_exact(s[m], m, kv_block, false);
    if (!kGeneral) pack(probabilities, s);
  }
  // As gemm_qk, with few registers: it must not weigh on the allocation of the main loop.
  __device__ void recompute_qk(Scores (&s)[kTilesQ], int kv_block) {
    const uint32_t q_base = q_lane_base(), k_base = k_stage(kv_block) + SmemQ::lane_offset(lane);
#pragma unroll
    for (int m = 0; m < kTilesQ; ++m) s[m].clear();
#pragma unroll 1
    for (int k = 0; k < kStepsD; ++k) {
#pragma unroll
      for (int m = 0; m < kTilesQ; ++m) {
        uint32_t a[4];
        load_a_rows_m<SmemQ>(a, q_base, m, k);
#pragma unroll
        for (int n = 0; n < Tile::kBlockKV / 16; ++n) {
          uint32_t b[4];
          load_b_rows_n<SmemQ>(b, k_base, k, n);
          ptx::mma_m16n8k16<kDType>(s[m].acc[2 * n], a, b[0], b[1]);
          ptx::mma_m16n8k16<kDType>(s[m].acc[2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  __device__ void drop_scores(Scores& s, int m, int kv_block) const {
#pragma unroll
    for (int r = 0; r < Scores::kRows; ++r) {
      const int q = row0(m) + Scores::row(lane, r);
#pragma unroll
      for (int c = 0; c < Scores::kCols; c += 2) {
        const int kv = kv_block * Tile::kBlockKV + Scores::col(lane, c);
        const PhiloxWords words = dropout.words(q, kv / 4);
        const bool upper = kv % 4 != 0;  // this lane's pair in the group of four columns
        if ((upper ? words.word[2] : words.word[0]) < dropout.threshold) s.at(r, c) = 0.0f;
        if ((upper ? words.word[3] : words.word[1]) < dropout.threshold) s.at(r, c + 1) = 0.0f;
      }
    }
  }

  __device__ void main_loop(const BlockRange& range) {
    load_q();
    ptx::cp_async_commit();
    load_k(range.end - 1);
    ptx::cp_async_commit();
    if constexpr (Tile::kQInRegs) {
      ptx::cp_async_wait<1>();
      __syncthreads();  // Q has arrived
      load_q_regs();
    }
    Operand probabilities;  // of the block before
    bool settled = false;   // every row of this warp has met a key
    for (int kv_block = range.end - 1; kv_block >= range.begin; --kv_block) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // K(j) and V(j + 1) have arrived; every warp is done with those before
      load_v(kv_block);
      if (kv_block > range.begin) load_k(kv_block - 1);
      ptx::cp_async_commit();

      Scores s[kTilesQ];
      gemm_qk(s, kv_block);
      const bool masked = range.is_masked(kv_block);
      if (masked || !settled || p.strict) {
        if (kv_block + 1 < range.end) gemm_pv(probabilities, kv_block + 1);
        bool all = true;
#pragma unroll
        for (int m = 0; m < kTilesQ; ++m) {
          softmax_exact(s[m], m, kv_block, masked);
          all = all && rows[m].settled();
        }
        settled = __all_sync(0xffffffffu, all);
        if (!kGeneral) pack(probabilities, s);
      } else {
        softmax_stale(s, probabilities, kv_block);
      }
      if constexpr (kGeneral) {
        if (p.dropout_p > 0.0f) {
#pragma unroll
          for (int m = 0; m < kTilesQ; ++m) drop_scores(s[m], m, kv_block);
        }
        pack(probabilities, s);
      }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the last V has arrived
    gemm_pv(probabilities, range.begin);
  }

  // ---- epilogue: normalise, then 16-byte rows through this warp's own part of Q's buffer
  __device__ void store() {
#pragma unroll
    for (int m = 0; m < kTilesQ; ++m) {
      float inverse[2], lse[2];
      float sink = -INFINITY;
      if constexpr (kGeneral) {
        if (p.sink) sink = p.sink[head];
      }
      rows[m].finalize(inverse, lse, sink);
      if constexpr (kGeneral) {
        if (p.dropout_p > 0.0f) {
          inverse[0] *= dropout.keep_scale;
          inverse[1] *= dropout.keep_scale;
        }
      }
      store_lse(m, lse);
      scale_output(m, inverse);
    }
    __syncthreads();  // Q is not read any more (a repair of another warp reads only its own rows)
    const uint32_t smem = smem_q + warp * kTilesQ * 16 * SmemV::kRowBytes;
#pragma unroll
    for (int m = 0; m < kTilesQ; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int t = 0; t < Output::kTiles; ++t) {
          const int row = m * 16 + Output::row(lane, r);
          ptx::store_shared_4(smem + SmemV::offset(row, t) + 4 * (lane % 4),
                              ptx::pack<kDType>(o[m].acc[t][2 * r], o[m].acc[t][2 * r + 1]));
        }
      }
    }
    __syncwarp();
    store_rows(smem);
  }
  __device__ void store_lse(int m, const float (&lse)[2]) const {
    if (lane % 4 != 0) return;
    float* base = p.lse + seq.q_batch * p.lse_batch_stride + head * p.lse_head_stride + seq.q_row0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0(m) + Output::row(lane, r);
      if (row < seq.seqlen_q_slot) base[row] = row < seq.seqlen_q ? lse[r] : -INFINITY;
    }
  }
  __device__ void store_rows(uint32_t smem) const {
    uint16_t* base = static_cast<uint16_t*>(p.out) + seq.q_batch * p.out_stride.batch +
                     head * p.out_stride.head + seq.q_row0 * p.out_stride.row;
    constexpr int kLanes = SmemV::kGroup, kRowStep = 32 / kLanes;
#pragma unroll
    for (int i = 0; i < kTilesQ * 16 / kRowStep; ++i) {
      const int row = i * kRowStep + lane / kLanes;
      const int q = q0 + warp * kTilesQ * 16 + row;
      if (q >= seq.seqlen_q_slot) break;
      uint16_t* gmem = base + q * p.out_stride.row;
#pragma unroll
      for (int j = 0; j < SmemV::kChunks / kLanes; ++j) {
        const int chunk = j * kLanes + lane % kLanes;
        if (chunk * 8 >= p.head_dim_v) continue;
        uint32_t v[4] = {0, 0, 0, 0};
        if (q < seq.seqlen_q) ptx::load_shared_16(v, smem + SmemV::offset(row, chunk));
        ptx::store_global_16(gmem + chunk * 8, v);
      }
    }
  }
};

template <class Tile, DType kDType, Variant kVariant>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    fwd_kernel(const __grid_constant__ FwdParams p,
               const __grid_constant__ DenseSchedule schedule) {
  extern __shared__ __align__(128) char smem[];
  WorkTile work;
  if (p.cu_seqlens_q) {
    const int blocks = gridDim.x / p.num_heads_q;
    const int h = blockIdx.x / blocks;
    work = find_packed_block(p.cu_seqlens_q, p.batch, static_cast<int>(p.total_q), Tile::kBlockQ,
                             blockIdx.x - h * blocks);
    work.head = h;
  } else {
    work = schedule.tile(blockIdx.x);
    work.valid = work.valid && work.block * Tile::kBlockQ < p.seqlen_q;
  }
  if (!work.valid) return;

  FwdBlock<Tile, kDType, kVariant> block(p, work, ptx::smem_addr(smem));
#pragma unroll
  for (int m = 0; m < Tile::kTilesQ; ++m) {
    block.o[m].clear();
    block.rows[m].reset();
  }
  const BlockRange range = block.mask.kv_blocks(block.q0, Tile::kBlockQ, Tile::kBlockKV);
  if (range.begin < range.end) block.main_loop(range);
  block.store();
}

}  // namespace flash_cuda::sm80
