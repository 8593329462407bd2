// The decoding step where all tiles are alike: no tensor of lengths, no window, no pages, one tile
// of rows for a head, and every tile cut into the same number of parts. What decode_stream.cuh
// does, by a kernel that is told and does as little as it can: a short call takes as long as its
// instructions take to arrive.
//
// Thread block (part, head, batch) has one run of keys of one tile.
#pragma once

#include "sm80/decode_merge.cuh"
#include "sm80/decode_warps.cuh"

namespace flash_cuda::sm80 {

struct DecodeEven {
  const char *q, *k, *v;
  char* out;
  float* lse;
  Stride q_stride, k_stride, v_stride, out_stride;
  int64_t lse_batch_stride, lse_head_stride;
  int seqlen_kv, head_dim;
  int diagonal;              // query i sees the keys before seqlen_kv - diagonal + i
  int group, inverse_group;  // query heads that are rows of a tile; 2^16 / group, rounded up
  int rows;                  // of a tile
  int each, more;            // blocks of keys of a part; the first `more` parts have one more
  float softmax_scale;
  int counters;      // which of the arrivals the launch has; a counter for each tile
  float* piece_out;  // (tiles, parts, rows, kHeadDim)
  float* piece_lse;  // (tiles, rows, parts)
};

// The parts of a tile.
struct EvenPieces {
  static constexpr int extra = 0;
  float *out, *lses;
  int parts, width, stride;

  __device__ __forceinline__ float* lse_at(int row, int piece) const {
    return lses + row * parts + piece;
  }
  __device__ __forceinline__ float lse(int row, int piece) const {
    return __ldcg(lse_at(row, piece));
  }
  __device__ __forceinline__ float* first_column(int row) const { return out + row * width; }
};

template <class Tile, DType kDType>
struct DecodeEvenBlock : DecodeWarps<Tile, kDType> {
  using Base = DecodeWarps<Tile, kDType>;
  using Ring = DecodeRing<Tile, /*kPaged=*/false>;
  using Base::kRowTiles, Base::kStepKeys, Base::warp, Base::lane;

  const DecodeEven& p;
  const int part = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int parts = gridDim.x;

  __device__ __forceinline__ DecodeEvenBlock(const DecodeEven& params, uint32_t smem)
      : Base(smem, params.softmax_scale), p(params) {}

  __device__ __forceinline__ int query(int row) const { return row * p.inverse_group >> 16; }
  __device__ __forceinline__ int query_head(int row) const {
    return head * p.group + row - query(row) * p.group;
  }
  __device__ __forceinline__ int tile() const { return batch * static_cast<int>(gridDim.y) + head; }
  __device__ __forceinline__ EvenPieces pieces() const {
    const int first_row = tile() * parts * p.rows;
    return {p.piece_out + int64_t{first_row} * Tile::kHeadDim, p.piece_lse + first_row, parts,
            Tile::kHeadDim, p.rows * Tile::kHeadDim};
  }
  __device__ __forceinline__ KvPlaces places() const {
    KvPlaces s{};
    s.k = {p.k + 2 * (batch * p.k_stride.batch + head * p.k_stride.head), 2 * p.k_stride.row, 0};
    s.v = {p.v + 2 * (batch * p.v_stride.batch + head * p.v_stride.head), 2 * p.v_stride.row, 0};
    return s;
  }
  __device__ __forceinline__ void load_query(typename Base::QueryPieces& pieces) const {
    const char* base = p.q + 2 * batch * p.q_stride.batch;
    Base::load_query(p.rows, p.head_dim, pieces, [this, base](int row) {
      return base + 2 * (query(row) * p.q_stride.row + query_head(row) * p.q_stride.head);
    });
  }
  __device__ __forceinline__ void main_loop(Ring& ring) {
    const int begin = (part * p.each + min(part, p.more)) * Tile::kBlockKV;
    const int end = min(begin + (p.each + (part < p.more ? 1 : 0)) * Tile::kBlockKV, p.seqlen_kv);
    const int first_key = begin + warp * kStepKeys, diagonal = p.seqlen_kv - p.diagonal;
    ring.start(places(), first_key, end, p.head_dim, p.head_dim);
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
  __device__ __forceinline__ void store() {
    if (parts == 1) {
      Base::merge_warps(
          p.rows, [&](int row, float lse) { store_lse(row, lse); },
          [&](int row) { return place_of(row); },
          [&](char* place, int col, const float (&v)[4]) { store_out(place, col, v); });
      return;
    }
    const EvenPieces mine = pieces();
    Base::merge_warps(
        p.rows, [&](int row, float lse) { *mine.lse_at(row, part) = lse; },
        [&](int row) { return mine.first_column(row) + part * mine.stride; },
        [&](float* place, int col, const float (&v)[4]) {
          *reinterpret_cast<float4*>(place + col) = make_float4(v[0], v[1], v[2], v[3]);
        });
  }
  __device__ __forceinline__ void merge_parts() const {
    const EvenPieces all = pieces();
#pragma unroll 1
    for (int row = warp; row < p.rows; row += Tile::kWarps) {
      char* place = place_of(row);
      DecodeMerge<EvenPieces>(all, row).run(
          [&](float lse) { store_lse(row, lse); },
          [&](int col, const float (&v)[4]) { store_out(place, col, v); });
    }
  }
};

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    decode_even_kernel(const __grid_constant__ DecodeEven p) {
  extern __shared__ __align__(128) char smem[];
  __shared__ bool last;
  using Block = DecodeEvenBlock<Tile, kDType>;
  typename Block::Ring ring(ptx::smem_addr(smem) + Tile::kBytesQ);
  Block block(p, ptx::smem_addr(smem));
  block.main_loop(ring);
  block.store();
  if (block.parts > 1 && is_last_piece(&arrivals[p.counters][block.tile()], block.parts, last)) {
    block.merge_parts();
  }
}

}  // namespace flash_cuda::sm80
