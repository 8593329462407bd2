// The ring of stages of one warp of a split-KV kernel (decode_warps.cuh), and the copies into it.
//
// A stage holds a step: 16 rows of K and, behind them, 16 of V. Pages are data: lane i finds the
// place of key i, a step ahead of its load.
#pragma once

#include "common/kv_view.cuh"
#include "common/swizzle.cuh"
#include "ptx/cp_async.h"
#include "sm80/decode_tile.h"

namespace flash_cuda::sm80 {

// kPaged compiles pages in, as a run-time branch.
template <class Tile, bool kPaged>
struct DecodeRing {
  static constexpr int kStepKeys = 16;
  using Smem = SwizzledTile<Tile::kHeadDim>;
  static_assert(Tile::kHeadDim == Tile::kHeadDimV);

  const int lane = threadIdx.x % 32;
  const uint32_t smem;
  const uint64_t policy;  // of the L2
  KvPlaces places;
  KvPlace next_place;  // of this lane's row in the next step to be loaded
  int next_key, end;   // first key of that step; first that does not count
  int width_k, width_v;
  const char *next_k, *next_v;  // this lane's first 16 bytes in that step, without pages

  __device__ __forceinline__ DecodeRing(uint32_t rings)
      : smem(rings + threadIdx.x / 32 * Tile::kStages * Tile::kBytesStep),
        policy(ptx::l2_evict_first()) {}
  __device__ __forceinline__ uint32_t stage(int s) const { return smem + s * Tile::kBytesStep; }

  // Steps from `key` on, Tile::kBlockKV keys apart.
  __device__ __forceinline__ void start(const KvPlaces& where, int key, int keys_end, int head_dim,
                                        int head_dim_v) {
    places = where;
    next_key = key;
    end = keys_end;
    width_k = head_dim;
    width_v = head_dim_v;
    if constexpr (kPaged) next_place = places.find(next_key + lane % kStepKeys, end);
    next_k = column(places.k) + (key + lane / kLanes) * places.k.row_bytes;
    next_v = column(places.v) + (key + lane / kLanes) * places.v.row_bytes;
  }
  // Loads the next step.
  __device__ __forceinline__ void load(int to) {
    const char *rows_k[kRows], *rows_v[kRows];  // this lane's
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows_k[i] = next_k + i * kRowStep * places.k.row_bytes;
      rows_v[i] = next_v + i * kRowStep * places.v.row_bytes;
    }
    if constexpr (kPaged) {
      if (places.pages) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const KvPlace at = KvPlaces::of_lane(next_place, lane / kLanes + i * kRowStep);
          rows_k[i] = KvPlaces::row(column(places.k), places.k, at);
          rows_v[i] = KvPlaces::row(column(places.v), places.v, at);
        }
      }
    }
    load_tensor(stage(to), rows_k, width_k);
    load_tensor(stage(to) + Tile::kBytesStepK, rows_v, width_v);
    next_k += Tile::kBlockKV * places.k.row_bytes;
    next_v += Tile::kBlockKV * places.v.row_bytes;
    next_key += Tile::kBlockKV;
    if constexpr (kPaged) next_place = places.find(next_key + lane % kStepKeys, end);
  }
  __device__ __forceinline__ static void commit() { ptx::cp_async_commit(); }
  // The oldest step has arrived, kLater may be under way.
  template <int kLater>
  __device__ __forceinline__ static void wait() {
    ptx::cp_async_wait<kLater>();
  }
  __device__ __forceinline__ static void wait_all() { ptx::cp_async_wait<0>(); }

 private:
  static constexpr int kLanes = 8, kRowStep = 32 / kLanes;  // lanes on a row of a copy
  static constexpr int kRows = kStepKeys / kRowStep;

  __device__ __forceinline__ const char* column(const KvTensor& t) const {
    return t.base + lane % kLanes * 16;
  }
  // Rows that do not count may lie anywhere: nothing is read there.
  __device__ __forceinline__ void load_tensor(uint32_t to, const char* const (&rows)[kRows],
                                              int width) const {
    const int rows_left = end - next_key - lane / kLanes;  // from this lane's first on
    static_assert(Smem::kGroup == kLanes, "rows 8 apart are permuted alike");
    const uint32_t lane_to[2] = {to + Smem::offset(lane / kLanes, lane % kLanes),
                                 to + Smem::offset(lane / kLanes + kRowStep, lane % kLanes)};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < Smem::kChunks / kLanes; ++j) {
        const bool valid = i * kRowStep < rows_left && (lane % kLanes + j * kLanes) * 8 < width;
        ptx::cp_async_16(
            lane_to[i % 2] + i / 2 * (2 * kRowStep * Smem::kRowBytes) + j * kLanes * 16,
            rows[i] + j * kLanes * 16, valid, policy);
      }
    }
  }
};

}  // namespace flash_cuda::sm80
