// The bias of transposed scores and its gradient, in tiles that the copy engine moves.
//
// A tile is kBlockQ queries x 128 keys, 64 of them a warpgroup's, in panels of 128 bytes of keys
// ([query][128 bytes], 128-byte swizzle). A thread has two keys of it, and two of every eight
// queries: in a 16-bit tile just what ldmatrix gives when it transposes, in float32 a number at a
// time, in which the swizzle leaves no bank conflicts. The gradient is staged in place of the bias.
#pragma once

#include "ptx/fence.h"
#include "ptx/ldmatrix.h"
#include "ptx/math.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/smem_addr.h"
#include "ptx/tma.h"
#include "sm90/bwd_bias.cuh"
#include "sm90/bwd_smem.cuh"

namespace flash_cuda::sm90 {

// A place among the tiles of bias, whose ring goes with the one of Q.
template <class Tile>
struct BiasPlace {
  int stage;
  uint32_t phase;
  __device__ BiasPlace(int q_stage, uint32_t q_phase)
      : stage(Tile::kBiasStages == 2 ? q_stage : 0),
        phase(Tile::kBiasStages == 2 ? q_phase : static_cast<uint32_t>(q_stage)) {}
};

// One thread: `kPanels` panels of 32 keys as float32, half as many of 64 in 16 bits, of a step.
template <int kPanels>
__device__ __forceinline__ void load_bias_panels(const BwdArgs& args, const BwdMaps& maps,
                                                 uint32_t to, uint32_t bar, int sequence, int head,
                                                 int key0, int q0) {
  const FwdParams& p = args.params.fwd;
  const bool wide = p.bias_dtype == DType::kFloat32;
  const int c2 = p.bias_head_stride ? head : 0, c3 = p.bias_batch_stride ? sequence : 0;
  const uint64_t policy =
      p.bias_head_stride && p.bias_batch_stride ? ptx::kEvictFirst : ptx::kEvictNormal;
  ptx::mbarrier_arrive_expect_tx(bar, kPanels * 8192 / (wide ? 1 : 2));
#pragma unroll 1
  for (int panel = 0; panel < kPanels; panel += wide ? 1 : 2) {
    ptx::tma_load_4d(to + panel * 8192, &maps.bias, bar, key0 + 32 * panel, q0, c2, c3, policy);
  }
}

// One thread: the tile of a step.
template <class Tile>
__device__ __forceinline__ void bwd_load_bias(const BwdArgs& args, const BwdMaps& maps,
                                              const BwdTask<Tile>& task, uint32_t smem,
                                              const RingPlace& ring, int head, int q0) {
  using Smem = BwdSmem<Tile>;
  if (args.bias_read != BiasAccess::kTiles) return;
  const BwdBarriers<Tile> bars{smem + Smem::kBarriers};
  const BiasPlace<Tile> at(ring.slot, ring.phase);
  ptx::mbarrier_wait(bars.bias_empty(at.stage), at.phase ^ 1);
  load_bias_panels<4>(args, maps, smem + Smem::kBias + at.stage * Smem::kBiasBytes,
                      bars.bias_full(at.stage), task.sequence, head, task.kv0, q0);
}

// A consumer thread's share of the 64 queries x 64 keys of its warpgroup: two panels of 32 keys in
// float32, one of 64 in 16 bits.
template <DType kDType>
struct BwdBiasPart {
  static constexpr int kScores = 32;
  static constexpr int kPanelBytes = 64 * 128;
  const BwdArgs& args;
  const Mask& mask;
  const int sequence, head;
  const uint32_t base;         // in shared memory
  const int thread, key0, q0;  // thread: in the warpgroup; first key and query

  __device__ int lane() const { return thread & 31; }
  __device__ int warp() const { return thread >> 5; }
  __device__ int key() const { return key0 + warp() * 16 + lane() / 4; }
  // Of float32: the thread's number of query 2 * (lane % 4) + e and key + 8 * r; those of the next
  // eight queries lie 1024 bytes further.
  __device__ uint32_t number(int e, int r) const {
    const int q = 2 * (lane() % 4) + e, chunk = (warp() % 2) * 4 + lane() / 16 + 2 * r;
    return base + warp() / 2 * kPanelBytes + q * 128 + ((chunk ^ q) << 4) + lane() / 4 % 4 * 4;
  }

  __device__ float slope() const {
    const FwdParams& p = args.params.fwd;
    return p.alibi_slopes[sequence * p.alibi_batch_stride + head];
  }
  // Of score i: how far its query and its key are apart.
  __device__ float away(int i) const {
    const int first = q0 + 2 * (lane() % 4) + mask.offset - key();
    return fabsf(static_cast<float>(first) + (i / 4 * 8 + i % 2 - i / 2 % 2 * 8));
  }

  __device__ float value(int64_t i) const {
    const FwdParams& p = args.params.fwd;
    return p.bias_dtype == DType::kFloat32
               ? __ldg(static_cast<const float*>(p.bias) + i)
               : ptx::to_float<kDType>(__ldg(static_cast<const uint16_t*>(p.bias) + i));
  }
  // Both keys' values where all queries share one row, else 0.
  __device__ float2 key_bias() const {
    const FwdParams& p = args.params.fwd;
    float2 b = {0.0f, 0.0f};
    if (args.bias_read != BiasAccess::kKeys) return b;
    const int64_t first =
        sequence * p.bias_batch_stride + head * p.bias_head_stride + key() * p.bias_col_stride;
    if (key() < mask.seqlen_kv) b.x = value(first);
    if (key() + 8 < mask.seqlen_kv) b.y = value(first + 8 * p.bias_col_stride);
    return b;
  }

  // Calls use(j, bias of the four scores of queries 8 * j and on) for all j: of the tile, or where
  // there is none of the keys.
  template <class Use>
  __device__ void for_tile(const Use& use) const {
    if (args.params.fwd.bias_dtype == DType::kFloat32) {
      for_floats(use);
    } else {
      for_halves(use);
    }
  }
  template <class Use>
  __device__ static void for_keys(float2 of_keys, const Use& use) {
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float b[4] = {of_keys.x, of_keys.x, of_keys.y, of_keys.y};
      use(j, b);
    }
  }
  template <class Use>
  __device__ void for_halves(const Use& use) const {
    const int row = lane() % 8 + lane() / 16 * 8, chunk = 2 * warp() + lane() / 8 % 2;
    const uint32_t from = base + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
    for (int j = 0; j < kScores / 4; j += 2) {
      uint32_t pairs[4];
      ptx::ldmatrix_x4_trans(pairs, from + j * 1024);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 x = ptx::unpack<kDType>(pairs[2 * i]),
                     y = ptx::unpack<kDType>(pairs[2 * i + 1]);
        const float b[4] = {x.x, x.y, y.x, y.y};
        use(j + i, b);
      }
    }
  }
  template <class Use>
  __device__ void for_floats(const Use& use) const {
    const uint32_t from[4] = {number(0, 0), number(1, 0), number(0, 1), number(1, 1)};
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      float b[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) b[e] = ptx::load_shared_f32(from[e] + j * 1024);
      use(j, b);
    }
  }

  // dS of both keys, summed over the thread's queries.
  __device__ void add_to_keys(float2 sums, int block) const {
    add_dbias_of_keys(sums, dbias_of(args.params, args.dbias_block_stride * block, sequence, head),
                      args.params.dbias_col_stride, mask, key());
  }
  // dS to where the copy engine takes it from.
  __device__ void stage(const float (&ds)[kScores]) const {
    const uint32_t to[4] = {number(0, 0), number(1, 0), number(0, 1), number(1, 1)};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      ptx::store_shared_4(to[i % 4] + i / 4 * 1024, __float_as_uint(ds[i]));
    }
    ptx::fence_proxy_async_shared();
  }
};

// One thread: the 64 queries x 64 keys at `from`, two panels, to the gradient of the bias.
__device__ __forceinline__ void store_dbias_part(const BwdParams& g, const CUtensorMap& map,
                                                 uint32_t from, int sequence, int head, int key0,
                                                 int q0) {
  const int c2 = g.dbias_head_stride ? head : 0, c3 = g.dbias_batch_stride ? sequence : 0;
#pragma unroll 1
  for (int panel = 0; panel < 2; ++panel) {
    if (g.dbias_shared) {
      ptx::tma_reduce_add_4d(&map, from + panel * 8192, key0 + panel * 32, q0, c2, c3);
    } else {
      ptx::tma_store_4d(&map, from + panel * 8192, key0 + panel * 32, q0, c2, c3);
    }
  }
  ptx::bulk_commit_group();
}

// What a consumer thread does with the bias of a step.
template <class Tile, DType kDType>
struct BwdBias {
  using Smem = BwdSmem<Tile>;
  using Part = BwdBiasPart<kDType>;
  static constexpr int kScores = Tile::kBlockQ / 2;
  const BwdArgs& args;
  const uint32_t smem;
  const int warpgroup, thread;  // thread: in the warpgroup
  const BwdTask<Tile>& task;
  const int group, q0;
  const BiasPlace<Tile> at;

  __device__ BwdBarriers<Tile> bars() const { return {smem + Smem::kBarriers}; }
  __device__ Part part() const {
    return {args,
            task.mask,
            task.sequence,
            task.first_q_head() + group,
            smem + Smem::kBias + at.stage * Smem::kBiasBytes + warpgroup * (Smem::kBiasBytes / 2),
            thread,
            task.kv0 + warpgroup * 64,
            q0};
  }

  // Calls use(j, bias of the four scores of queries 8 * j and on) for all j.
  template <class Use>
  __device__ void for_each(const Use& use) const {
    if (args.bias_read == BiasAccess::kTiles) {
      ptx::mbarrier_wait(bars().bias_full(at.stage), at.phase);
      part().for_tile(use);
      if (args.bias_write != BiasAccess::kTiles) ptx::mbarrier_arrive(bars().bias_empty(at.stage));
    } else {
      part().for_keys(part().key_bias(), use);
    }
  }
  // dS to the gradient.
  __device__ void write(const BwdMaps& maps, const float (&ds)[kScores]) const {
    static_assert(Smem::kBiasBytes == 4 * Part::kPanelBytes);
    if (args.bias_write == BiasAccess::kNone) return;
    const Part mine = part();
    if (args.bias_write == BiasAccess::kKeys)
      return mine.add_to_keys(sum_of_keys(ds), q0 / Tile::kBlockQ);
    // The others have read the bias there, and the copy engine the gradient of the step before.
    ptx::named_barrier_sync(kBiasTile + warpgroup, 128);
    mine.stage(ds);
    ptx::named_barrier_sync(kBiasTile + warpgroup, 128);
    if (thread == 0) {
      store_dbias_part(args.params, maps.dbias, mine.base, mine.sequence, mine.head, mine.key0, q0);
    }
  }
  // Some time after write: the tile may be loaded again.
  __device__ void hand_back() const {
    if (args.bias_write != BiasAccess::kTiles || thread != 0) return;
    ptx::bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(bars().bias_empty(at.stage));
  }
};

}  // namespace flash_cuda::sm90
