// The decoding step where all tiles are alike: no tensor of lengths, no pages, and every tile cut
// into the same number of parts. Thread block (part, head, batch) has one run of keys of one tile.
#pragma once

#include "sm80/decode_lean.cuh"

namespace flash_cuda::sm80 {

struct DecodeEvenArgs : DecodeLeanArgs {
  int each, more;    // blocks of keys of a part; the first `more` parts have one more
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
struct DecodeEvenBlock : DecodeLean<Tile, kDType> {
  using Base = DecodeLean<Tile, kDType>;
  using Ring = DecodeRing<Tile, /*kPaged=*/false>;
  using Base::batch, Base::head;

  const DecodeEvenArgs& p;
  const int part = blockIdx.x, parts = gridDim.x;

  __device__ __forceinline__ DecodeEvenBlock(const DecodeEvenArgs& args, uint32_t smem)
      : Base(args, blockIdx.z, blockIdx.y, smem), p(args) {}

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
  __device__ __forceinline__ void main_loop(Ring& ring) {
    const int begin = (part * p.each + min(part, p.more)) * Tile::kBlockKV;
    const int end = min(begin + (p.each + (part < p.more ? 1 : 0)) * Tile::kBlockKV, p.seqlen_kv);
    Base::main_loop(ring, places(), begin, end, p.seqlen_kv);
  }
  __device__ __forceinline__ void store() {
    if (parts == 1) {
      Base::merge_warps(
          p.rows, [&](int row, float lse) { Base::store_lse(row, lse); },
          [&](int row) { return Base::place_of(row); },
          [&](char* place, int col, const float (&v)[4]) { Base::store_out(place, col, v); });
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
};

template <class Tile, DType kDType>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    decode_even_kernel(const __grid_constant__ DecodeEvenArgs p) {
  extern __shared__ __align__(128) char smem[];
  __shared__ bool last;
  using Block = DecodeEvenBlock<Tile, kDType>;
  typename Block::Ring ring(ptx::smem_addr(smem) + Tile::kBytesQ);
  Block block(p, ptx::smem_addr(smem));
  block.main_loop(ring);
  block.store();
  if (block.parts > 1 && is_last_piece(&arrivals[p.counters][block.tile()], block.parts, last)) {
    block.merge_parts(block.pieces());
  }
}

}  // namespace flash_cuda::sm80
