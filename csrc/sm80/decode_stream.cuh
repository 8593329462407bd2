// Split-KV attention of up to 32 rows, without score modifications: the decoding step proper.
//
// Blocks of keys start at the same places for every row, so that a row's result depends on nothing
// but its keys.
#pragma once

#include "sm80/decode_merge.cuh"
#include "sm80/decode_warps.cuh"
#include "sm80/decode_work.cuh"

namespace flash_cuda::sm80 {

template <class Tile, DType kDType>
struct DecodeStream : DecodeWarps<Tile, kDType> {
  using Base = DecodeWarps<Tile, kDType>;
  using Ring = DecodeRing<Tile, /*kPaged=*/true>;
  using Rows = DecodeTileRows<Tile::kBlockQ, Tile::kBlockKV, kDType>;
  using Base::kRowTiles, Base::kStepKeys, Base::warp, Base::lane;

  const FwdParams& p;
  const Rows rows;
  const typename Rows::Keys keys;

  __device__ __forceinline__ DecodeStream(const FwdParams& params, const DecodeGrid& grid,
                                          const DecodeState& state, uint32_t smem)
      : Base(smem, params.softmax_scale), p(params), rows(params, grid, state), keys(rows.keys()) {}

  __device__ __forceinline__ void load_query(typename Base::QueryPieces& pieces) const {
    const char* base = static_cast<const char*>(p.q) +
                       2 * (rows.seq.q_batch * p.q_stride.batch +
                            rows.first_head() * p.q_stride.head + rows.seq.q_row0 * p.q_stride.row);
    Base::load_query(rows.rows_left(), p.head_dim, pieces,
                     [base, first = rows.row0(), group = rows.grid.group,
                      row_bytes = 2 * p.q_stride.row, head_bytes = 2 * p.q_stride.head](int i) {
                       const int query = (first + i) / group;
                       return base + query * row_bytes + (first + i - query * group) * head_bytes;
                     });
  }
  __device__ __forceinline__ void mask(int key, typename Base::Scores (&s)[kRowTiles]) const {
    if (key >= keys.full_begin && key + kStepKeys <= keys.full_end) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      apply_mask(s[m], lane, key, [&](int row, int& begin, int& end) {
        const int query = rows.query(m * 16 + row);
        begin = rows.mask.kv_begin(query);
        end = min(rows.mask.kv_end(query), keys.end);
      });
    }
  }
  __device__ __forceinline__ void run(Ring& ring) {
    if (keys.begin < keys.end) {
      const int first_key = keys.begin + warp * kStepKeys;
      ring.start(KvPlaces::make(p, rows.seq, rows.segment.batch, rows.kv_head()), first_key,
                 keys.end, p.head_dim, p.head_dim_v);
      Base::main_loop(
          ring, ceil_div(keys.end - keys.begin, Tile::kBlockKV),
          [&](auto& pieces) { load_query(pieces); },
          [&](int i, typename Base::Scores(&s)[kRowTiles]) {
            mask(first_key + i * Tile::kBlockKV, s);
          });
    }
    using Place = typename Rows::RowPlace;
    Base::merge_warps(
        Tile::kBlockQ, [&](int row, float lse) { rows.store_lse(row, lse); },
        [&](int row) {
          return rows.wants_out(keys.begin < keys.end) ? rows.place_of(row) : Place{};
        },
        [](const Place& place, int col, const float (&v)[4]) { Rows::store_out(place, col, v); });
  }
};

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    decode_stream_kernel(const __grid_constant__ FwdParams p,
                         const __grid_constant__ DecodeGrid grid) {
  extern __shared__ __align__(128) char smem[];
  __shared__ DecodeState state;
  using Stream = DecodeStream<Tile, kDType>;
  const uint32_t base = ptx::smem_addr(smem);
  typename Stream::Ring ring(base + Tile::kBytesQ);
  const DecodeWalk<Tile::kBlockQ, Tile::kBlockKV, Tile::kThreads> walk{p, grid, state};
  walk.start();
  while (walk.next()) {
    Stream stream(p, grid, state, base);
    stream.run(ring);
    merge_if_last<Tile::kThreads>(stream.rows, state);
    __syncthreads();  // shared memory may be written again
  }
}

}  // namespace flash_cuda::sm80
