// What the kernels of a plain decoding step share (decode_even.cuh, decode_dealt.cuh): one tile of
// rows for a KV head of a dense batch, no window. They are told and do as little as they can: a
// short call takes as long as its instructions take to arrive.
#pragma once

#include "sm80/decode_merge.cuh"
#include "sm80/decode_warps.cuh"

namespace flash_cuda::sm80 {

struct DecodeLeanArgs {
  const char *q, *k, *v;
  char* out;
  float* lse;
  Stride q_stride, k_stride, v_stride, out_stride;
  int64_t lse_batch_stride, lse_head_stride;
  int seqlen_kv, head_dim;
  int diagonal;              // query i sees the keys before length - diagonal + i
  int group, inverse_group;  // query heads that are rows of a tile; 2^16 / group, rounded up
  int rows;                  // of a tile
  float softmax_scale;
  int counters;  // which of the arrivals the launch has
};

// A run of keys of one tile.
template <class Tile, DType kDType>
struct DecodeLean : DecodeWarps<Tile, kDType> {
  using Base = DecodeWarps<Tile, kDType>;
  using Base::kRowTiles, Base::kStepKeys, Base::warp, Base::lane;

  const DecodeLeanArgs& p;
  const int batch, head;

  __device__ __forceinline__ DecodeLean(const DecodeLeanArgs& args, int b, int h, uint32_t smem)
      : Base(smem, args.softmax_scale), p(args), batch(b), head(h) {}

  __device__ __forceinline__ int query(int row) const { return row * p.inverse_group >> 16; }
  __device__ __forceinline__ int query_head(int row) const {
    return head * p.group + row - query(row) * p.group;
  }
  __device__ __forceinline__ void load_query(typename Base::QueryPieces& pieces) const {
    const char* base = p.q + 2 * batch * p.q_stride.batch;
    Base::load_query(p.rows, p.head_dim, pieces, [this, base](int row) {
      return base + 2 * (query(row) * p.q_stride.row + query_head(row) * p.q_stride.head);
    });
  }
  // Keys [begin, end) of `length`.
  template <class Ring>
  __device__ __forceinline__ void main_loop(Ring& ring, const KvPlaces& places, int begin, int end,
                                            int length) {
    const int first_key = begin + warp * kStepKeys, diagonal = length - p.diagonal;
    ring.start(places, first_key, end, p.head_dim, p.head_dim);
    Base::main_loop(
        ring, ceil_div(end - begin, Tile::kBlockKV), [&](auto& pieces) { load_query(pieces); },
        [&](int i, typename Base::Scores(&s)[kRowTiles]) {
          const int key = first_key + i * Tile::kBlockKV;
          if (key + kStepKeys <= min(end, diagonal)) return;
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            apply_mask(s[m], lane, key, [&](int row, int& from, int& to) {
              from = 0;
              to = min(diagonal + query(m * 16 + row), end);
            });
          }
        });
  }
  __device__ __forceinline__ void store_lse(int row, float lse) const {
    p.lse[batch * p.lse_batch_stride + query_head(row) * p.lse_head_stride + query(row)] = lse;
  }
  __device__ __forceinline__ char* place_of(int row) const {
    return p.out + 2 * (batch * p.out_stride.batch + query(row) * p.out_stride.row +
                        query_head(row) * p.out_stride.head);
  }
  __device__ __forceinline__ void store_out(char* place, int col, const float (&v)[4]) const {
    if (col >= p.head_dim) return;
    *reinterpret_cast<uint2*>(place + 2 * col) =
        make_uint2(ptx::pack<kDType>(v[0], v[1]), ptx::pack<kDType>(v[2], v[3]));
  }
  // The pieces of the tile, a row for each warp.
  template <class Pieces>
  __device__ __forceinline__ void merge_parts(const Pieces& pieces) const {
#pragma unroll 1
    for (int row = warp; row < p.rows; row += Tile::kWarps) {
      char* place = place_of(row);
      DecodeMerge<Pieces>(pieces, row)
          .run([&](float lse) { store_lse(row, lse); },
               [&](int col, const float (&v)[4]) { store_out(place, col, v); });
    }
  }
};

}  // namespace flash_cuda::sm80
