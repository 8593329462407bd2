// Softmax warpgroup of the forward kernel: S of one Q tile becomes P, a row a thread.
//
// A row subtracts a reference that follows its maximum only when left behind by more than 2^8: out
// and lse do not depend on the reference, and while it stays, O needs no scaling (0 for strict
// calls). The scale is published before the exponentials, so that O is ready when P is.
#pragma once

#include "common/score_mod.cuh"
#include "common/softmax.cuh"
#include "ptx/convert.h"
#include "ptx/math.h"
#include "ptx/packed.h"
#include "ptx/tcgen05.h"
#include "sm100/exp2_poly.cuh"
#include "sm100/fwd_args.h"
#include "sm100/fwd_smem.cuh"

namespace flash_cuda::sm100 {

constexpr float kRescaleThreshold = 8.0f;  // log2

template <class Tile, DType kDType>
struct Softmax {
  static constexpr int kN = Tile::kBlockKV;
  static constexpr int kFragment = 32;  // keys that are converted and stored together
  // Fragments with exponentials by polynomial: the middle ones, so that the special function unit
  // is busy while P is first and last stored.
  // Pairs of the 16 of a fragment, in two fragments.
  static constexpr int kEmulatedPairs = ptx::kExp2IsScarce ? Tile::kEmulated / 4 : 0;
  static_assert(Tile::kEmulated % 4 == 0 && kEmulatedPairs <= 16);

  const FwdSmem<Tile>& smem;
  const FwdArgs& args;
  const int tile;  // Q tile

  uint32_t s[kN];  // scores, then probabilities
  float reference, sum;
  uint32_t blocks = 0, used = 0;

  __device__ __forceinline__ int thread() const { return threadIdx.x % 128; }
  __device__ __forceinline__ float scale_log2() const {
    return (Tile::kGeneral ? 1.0f : args.params.softmax_scale) * kLog2e;
  }
  __device__ __forceinline__ float score(int i) const { return __uint_as_float(s[i]); }

  __device__ __forceinline__ int first_row(const FwdWork& w) const {
    return w.q_block * Tile::kBlockQ + 128 * tile;
  }
  __device__ __forceinline__ int row_of(const FwdWork& w) const { return first_row(w) + thread(); }

  // This warp's lanes of a column of tensor memory.
  __device__ __forceinline__ uint32_t lanes(uint32_t column) const {
    return column + ((threadIdx.x / 32 % 4) << 21);
  }

  __device__ __forceinline__ void load_scores(int slot) {
    const uint32_t from = lanes(Tile::kTmemS + slot * 128);
#pragma unroll
    for (int i = 0; i < kN; i += 32) ptx::tcgen05_ld_x32(s + i, from + i);
    ptx::tcgen05_wait_ld();
    ptx::tcgen05_loaded(s);
  }

  // Keys outside [begin, end) of the block become -inf.
  __device__ __forceinline__ void mask_scores(int begin, int end) {
    const uint32_t kMinusInf = 0xff800000u;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (i >= end) s[i] = kMinusInf;
    }
    if (begin > 0) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        if (i < begin) s[i] = kMinusInf;
      }
    }
  }

  // Products of Q and K become logits; each modification is a pass of its own, taken or not by the
  // whole block.
  __device__ __forceinline__ void modify_scores(const ScoreMod& mod, int row, int first_key) {
    if (mod.softcap > 0.0f) {
      const float to_cap = __fdividef(2.0f * kLog2e * mod.scale, mod.softcap);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const float tanh = 1.0f - __fdividef(2.0f, ptx::ex2(score(i) * to_cap) + 1.0f);
        s[i] = __float_as_uint(mod.softcap * tanh);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) s[i] = __float_as_uint(score(i) * mod.scale);
    }
    if (mod.alibi_slope != 0.0f) {
      const int distance = row + mod.offset - first_key;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        s[i] =
            __float_as_uint(score(i) - mod.alibi_slope * fabsf(static_cast<float>(distance - i)));
      }
    }
    if (mod.bias && row < mod.seqlen_q) {
      const int64_t first = row * mod.bias_row_stride + first_key * mod.bias_col_stride;
      const int keys = mod.seqlen_kv - first_key;
      const auto* halves = static_cast<const uint16_t*>(mod.bias) + first;
      switch (mod.bias_dtype) {
        case DType::kFloat32:
          return add_bias(static_cast<const float*>(mod.bias) + first, mod.bias_col_stride, keys,
                          [](float x) { return x; });
        case DType::kFloat16:
          return add_bias(halves, mod.bias_col_stride, keys, ptx::to_float<DType::kFloat16>);
        default:
          return add_bias(halves, mod.bias_col_stride, keys, ptx::to_float<DType::kBFloat16>);
      }
    }
  }
  template <class Element, class ToFloat>
  __device__ __forceinline__ void add_bias(const Element* bias, int64_t stride, int keys,
                                           ToFloat to_float) {
#pragma unroll
    for (int i = 0; i < kN; ++i, bias += stride) {
      if (i < keys) s[i] = __float_as_uint(score(i) + to_float(*bias));
    }
  }

  // A NaN among the scores is the maximum.
  __device__ __forceinline__ float row_maximum() const {
    float m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = score(i);
#pragma unroll
    for (int i = 4; i < kN; i += 8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        m[j] = ptx::max_nan(m[j], score(i + j));
        if (i + 4 + j < kN) m[j] = ptx::max_nan(m[j], score(i + 4 + j));
      }
    }
    return ptx::max_nan(ptx::max_nan(m[0], m[1]), ptx::max_nan(m[2], m[3]));
  }

  // Moves the reference if it has to; what the row's O and sum are to be multiplied with.
  __device__ __forceinline__ float move_reference(float maximum, float threshold) {
    // False for NaN, which then spreads, and for rows without keys so far.
    if (maximum - reference <= threshold) return 1.0f;
    const float scale = ptx::ex2(reference - (maximum == -INFINITY ? 0.0f : maximum));
    reference = maximum;
    return scale;
  }

  __device__ __forceinline__ static constexpr bool is_emulated(int fragment, int pair) {
    return (fragment == 1 || fragment == 2) &&
           (pair + 1) * kEmulatedPairs / 16 > pair * kEmulatedPairs / 16;
  }

  // P of one fragment, in fp32 in place and rounded to tensor memory.
  template <int kIndex>
  __device__ __forceinline__ void exponentials(float2 scale, float2 minus_reference, uint32_t p) {
    uint32_t packed[kFragment / 2];
#pragma unroll
    for (int i = 0; i < kFragment / 2; ++i) {
      const int at = kIndex * kFragment + 2 * i;
      float2 x = ptx::fma2(make_float2(score(at), score(at + 1)), scale, minus_reference);
      if (is_emulated(kIndex, i)) {
        x = exp2_polynomial<kDType>(x);
      } else {
        x = make_float2(ptx::ex2(x.x), ptx::ex2(x.y));
      }
      s[at] = __float_as_uint(x.x);
      s[at + 1] = __float_as_uint(x.y);
      packed[i] = ptx::pack<kDType>(x.x, x.y);
    }
    ptx::tcgen05_st_x16(p + kIndex * (kFragment / 2), packed);
  }

  __device__ __forceinline__ void hand_over(uint32_t barrier) {
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    arrive_warp(barrier);
  }

  __device__ __forceinline__ float sum_of_block() const {
    float2 sums[2] = {};
#pragma unroll
    for (int i = 0; i < kN; i += 4) {
      sums[0] = ptx::add2(sums[0], make_float2(score(i), score(i + 1)));
      sums[1] = ptx::add2(sums[1], make_float2(score(i + 2), score(i + 3)));
    }
    const float2 both = ptx::add2(sums[0], sums[1]);
    return both.x + both.y;
  }

  // Work stays in shared memory: what only masked blocks need is read there again, to keep the
  // registers of the others free.
  __device__ __forceinline__ void run_block(const FwdWork& w, bool masked, int kv_block) {
    const int slot = slot_of<Tile>(tile, blocks);
    ptx::mbarrier_wait(smem.barrier(kSFull, slot), phase_of<Tile>(blocks));
    ptx::tcgen05_fence_after_thread_sync();
    load_scores(slot);
    const int first_key = kv_block * kN;
    if constexpr (Tile::kGeneral) {
      modify_scores(ScoreMod::make(args.params, w.batch, w.head, w.seqlen_q, w.seqlen_kv),
                    row_of(w), first_key);
    }
    if (masked) {
      const Mask mask = Mask::make(args.params, w.seqlen_q, w.seqlen_kv);
      // Rows past the end are like the last one.
      const int row = min(row_of(w), w.seqlen_q - 1);
      mask_scores(mask.kv_begin(row) - first_key, mask.kv_end(row) - first_key);
    }
    const float threshold = Tile::kGeneral && args.params.strict ? 0.0f : kRescaleThreshold;
    const float scale = move_reference(row_maximum() * scale_log2(), threshold);
    smem.exchange->scale[slot][thread()] = scale;
    ptx::tcgen05_fence_before_thread_sync();
    arrive_warp(smem.barrier(kScaleFull, slot));

    const float base = reference == -INFINITY ? 0.0f : -reference;
    const float2 factor = make_float2(scale_log2(), scale_log2()), shift = make_float2(base, base);
    const uint32_t p = lanes(Tile::kTmemS + slot * 128 + Tile::kTmemP);
    exponentials<0>(factor, shift, p);
    exponentials<1>(factor, shift, p);
    exponentials<2>(factor, shift, p);
    hand_over(smem.barrier(kPReady, slot));
    exponentials<3>(factor, shift, p);
    hand_over(smem.barrier(kPLast, slot));
    sum = fmaf(sum, scale, sum_of_block());
    ++blocks;
  }

  // 1 / sum for the correction warpgroup (0: the row is zero), and lse.
  __device__ __forceinline__ void end_row(const FwdWork& w) {
    const FwdParams& p = args.params;
    const int row = row_of(w);
    const bool counts = row < w.seqlen_q;
    const float sink = p.sink ? p.sink[w.head] : -INFINITY;
    float inverse = 0.0f, lse = -INFINITY;
    if (counts && sink != -INFINITY) {
      const float base = fmaxf(reference, sink * kLog2e);
      const float shrink = ptx::ex2(reference - base);
      const float total = sum * shrink + ptx::ex2(sink * kLog2e - base);
      inverse = sum == 0.0f ? 0.0f : __fdividef(shrink, total);
      lse = base * kLn2 + logf(total);
    } else if (counts && sum != 0.0f) {
      inverse = __fdividef(1.0f, sum);
      lse = reference * kLn2 + logf(sum);
    }
    // Tiles of one block of keys do not wait for the correction warpgroup otherwise.
    ptx::mbarrier_wait(smem.barrier(kRowTaken, tile), used % 2 ^ 1);
    smem.exchange->inverse[tile][thread()] = inverse;
    arrive_warp(smem.barrier(kRowEnd, tile));
    if (row < w.seqlen_q_slot) {
      p.lse[w.batch * p.lse_batch_stride + w.head * p.lse_head_stride + w.q_row0 + row] = lse;
    }
  }

  __device__ __forceinline__ void run_tile(const FwdWork& w) {
    const BlockRange range = blocks_of<Tile>(args.params, w);
    if (range.end <= range.begin) return;
    const BlockRange own =
        Mask::make(args.params, w.seqlen_q, w.seqlen_kv).kv_blocks(first_row(w), 128, kN);
    reference = -INFINITY;
    sum = 0.0f;
#pragma unroll 1
    for (int b = range.end - 1; b >= range.begin; --b) run_block(w, own.is_masked(b), b);
    end_row(w);
    ++used;
  }

  __device__ __forceinline__ void run() {
    const auto ring = smem.work_ring();
    for (uint32_t tiles = 0;; ++tiles) {
      ring.wait_full(tiles);
      const FwdWork& w = smem.exchange->work[ring.stage(tiles)];
      if (w.q_block < 0) return;
      run_tile(w);
      arrive_warp(ring.empty(tiles));
    }
  }
};

}  // namespace flash_cuda::sm100
