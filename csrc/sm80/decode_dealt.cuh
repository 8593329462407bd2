// The decoding step proper: a dense batch of one tile of rows for a KV head, with lengths, pages or
// both, dealt out by the lengths on the device. What decode_stream.cuh does without what it knows
// about packed queries, windows and parts that were asked for.
//
// Where a thread block stands is found by each of its warps for itself and kept in registers that
// are the same in all of them: no barrier and no shared memory before the first load.
#pragma once

#include "sm80/decode_lean.cuh"

namespace flash_cuda::sm80 {

// Exact for what equal parts are found by: fewer than 2^(kInverseShift / 2) thread blocks.
constexpr int kInverseShift = 20;
static_assert(kMostShares <= 1 << kInverseShift / 2);

struct DecodeDealtArgs : DecodeLeanArgs {
  const int* lengths;          // (batch), or null: seqlen_kv everywhere
  const int* cache_batch_idx;  // (batch), or null
  const int* block_table;      // or null
  int64_t block_table_stride;
  int page_size, batch, heads;
  int fewer_shares;  // to deal out to where a call is short
  // Where the sequences turn out to have the same number of blocks of keys: parts of every tile, or
  // 0 and to how many thread blocks whole tiles are dealt out.
  int equal_parts, equal_shares;
  int inverse_parts, inverse_heads;  // 2^kInverseShift / equal_parts and / heads, rounded up
  unsigned inverse_blocks;           // (2^32 - 1) / equal_parts, rounded down
  DecodeSlots slots;
};

// What a thread block has of one tile.
struct DealtRun {
  int batch, head, length;
  int begin, end;          // keys
  int slot;                // of the piece; < 0: the tile is whole
  int first_share, parts;  // of the tile; parts 0: not known yet, for which there are
  int unit, blocks;        // where the tile's first block of keys is in the line, and how many
};

// The pieces of a tile in the slots of the workspace.
template <class Tile>
struct DealtPieces {
  static constexpr int width = Tile::kHeadDimV;
  static constexpr int extra = Tile::kBlockQ * width, stride = 2 * extra;
  const DecodeSlots& slots;
  const int first_share, parts;

  __device__ __forceinline__ float lse(int row, int piece) const {
    return __ldcg(slots.lse + row * slots.count + DecodeSlots::slot(first_share, piece));
  }
  __device__ __forceinline__ const float* first_column(int row) const {
    return slots.out + (2 * first_share * Tile::kBlockQ + row) * width;
  }
};

template <class Tile>
struct DealtWalk {
  static constexpr int kBlockKV = Tile::kBlockKV;

  const DecodeDealtArgs& p;
  Deal deal;
  int batch = 0, unit_in_batch = 0;  // of the next unit
  int unit = 0, end = 0;             // in the line

  __device__ __forceinline__ explicit DealtWalk(const DecodeDealtArgs& args) : p(args) {}

  // Deals out. True if the first run has been found, false if next() has to be asked.
  __device__ __forceinline__ bool start(DealtRun& r) {
    const int lane = threadIdx.x % 32, share = blockIdx.x;
    int length = p.seqlen_kv;
    if (p.lengths && lane < p.batch) length = __ldg(p.lengths + lane);
    // While the first lengths are under way: what this thread block has if all are alike.
    const int tile = min(share * p.inverse_parts >> kInverseShift, p.batch * p.heads - 1);
    r.batch = tile * p.inverse_heads >> kInverseShift;
    r.head = tile - r.batch * p.heads;
    r.length = length_of(r.batch);
    int sum = blocks_of(min(max(length, 0), p.seqlen_kv)), most = sum, least = sum;
    if (p.batch > 1) {
      if (lane >= p.batch) sum = most = 0, least = INT_MAX;
#pragma unroll 1
      for (int b = lane + 32; b < p.batch; b += 32) {
        const int blocks = blocks_of(length_of(b));
        sum += blocks;
        most = max(most, blocks);
        least = min(least, blocks);
      }
      most = __reduce_max_sync(0xffffffffu, most);
      least = __reduce_min_sync(0xffffffffu, least);
    } else {
      sum = lane == 0 ? sum : 0;
      most = least = blocks_of(r.length);
    }
    if (most == least && p.equal_parts > 0) {
      return find_part(r, tile, share - tile * p.equal_parts, most);
    }
    sum = __reduce_add_sync(0xffffffffu, sum) * p.heads;
    int shares = most == least ? p.equal_shares : gridDim.x;
    if (sum < kFewUnits * shares) shares = min(shares, p.fewer_shares);
    shares = min(shares, (sum + 1) / 2);
    if (share >= shares) return false;
    deal = Deal::make(sum + p.batch * p.heads * kTileOverhead, shares);
    unit = deal.begin(share);
    end = unit + deal.size_of(share);
    find_sequence(lane);
    return false;
  }
  // False after the last run.
  __device__ __forceinline__ bool next(DealtRun& r) {
#pragma unroll 1
    while (unit < end) {
      r.length = length_of(batch);
      const int blocks = blocks_of(r.length), units = p.heads * (kTileOverhead + blocks);
      if (unit_in_batch >= units) {
        unit_in_batch -= units;
        ++batch;
        continue;
      }
      const TileRun run = TileRun::make(unit_in_batch, end - unit, kTileOverhead, blocks);
      r.unit = unit + run.first_unit - run.first;
      r.blocks = blocks;
      r.parts = 0;
      unit += run.units;
      unit_in_batch += run.units;
      if (run.last <= 0) continue;  // all of it is overhead
      r.batch = batch;
      r.head = run.tile;
      set_keys(r, run.first, run.last, blocks);
      return true;
    }
    return false;
  }
  __device__ __forceinline__ DealtPieces<Tile> pieces(const DealtRun& r) const {
    if (r.parts > 0) return {p.slots, r.first_share, r.parts};
    const int first = deal.owner(r.unit);
    return {p.slots, first, deal.owner(r.unit + r.blocks - 1) - first + 1};
  }

 private:
  __device__ __forceinline__ int length_of(int b) const {
    return p.lengths ? min(max(__ldg(p.lengths + b), 0), p.seqlen_kv) : p.seqlen_kv;
  }
  // At least one, so that every tile has somebody who writes it.
  __device__ __forceinline__ static int blocks_of(int length) {
    return max(static_cast<int>(static_cast<unsigned>(length + kBlockKV - 1) / kBlockKV), 1);
  }
  __device__ __forceinline__ static void set_keys(DealtRun& r, int first, int last, int blocks) {
    r.begin = first * kBlockKV;
    r.end = min(last * kBlockKV, r.length);
    const int share = blockIdx.x;
    r.slot = first > 0 || last < blocks ? 2 * share + (first == 0 ? 1 : 0) : -1;
  }
  // All tiles have `blocks` blocks of keys, and each is cut alike: the only run of this thread
  // block, if there is one.
  __device__ __forceinline__ bool find_part(DealtRun& r, int tile, int part, int blocks) {
    int parts = p.equal_parts, each, more = 0;
    if (blocks >= 2 * parts) {
      each = __umulhi(blocks, p.inverse_blocks);
      if ((each + 1) * parts <= blocks) ++each;
      more = blocks - each * parts;
    } else {
      each = 2;
      parts = (blocks + 1) / 2;
    }
    if (part >= parts) return false;  // also where there are more thread blocks than parts
    const int first = part * each + min(part, more);
    set_keys(r, first, min(first + each + (part < more ? 1 : 0), blocks), blocks);
    r.first_share = tile * p.equal_parts;
    r.parts = parts;
    return true;
  }
  // The sequence that has `unit`.
  __device__ __forceinline__ void find_sequence(int lane) {
    int before = 0;
#pragma unroll 1
    for (int first = 0;; first += 32) {
      const int b = first + lane;
      const int mine = b < p.batch ? p.heads * (kTileOverhead + blocks_of(length_of(b))) : 0;
      int up_to = mine;
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, up_to, i);
        if (lane >= i) up_to += other;
      }
      const unsigned behind = __ballot_sync(0xffffffffu, before + up_to > unit);
      if (behind != 0 || first + 32 >= p.batch) {
        const int found = __ffs(behind) - 1;
        batch = first + found;
        unit_in_batch = unit - before - __shfl_sync(0xffffffffu, up_to - mine, found);
        return;
      }
      before += __shfl_sync(0xffffffffu, up_to, 31);
    }
  }
};

template <class Tile, DType kDType, bool kPaged>
struct DecodeDealtBlock : DecodeLean<Tile, kDType> {
  using Base = DecodeLean<Tile, kDType>;
  using Ring = DecodeRing<Tile, kPaged>;
  using Base::batch, Base::head;

  const DecodeDealtArgs& p;
  const DealtRun& run;

  __device__ __forceinline__ DecodeDealtBlock(const DecodeDealtArgs& args, const DealtRun& r,
                                              uint32_t smem)
      : Base(args, r.batch, r.head, smem), p(args), run(r) {}

  __device__ __forceinline__ KvPlaces places() const {
    KvPlaces s;
    s.pages = kPaged ? p.block_table + batch * p.block_table_stride : nullptr;
    s.page_size = p.page_size;
    s.page_shift = KvPlaces::shift_of(p.page_size);
    s.first_row = 0;
    const int64_t row = kPaged ? 0 : p.cache_batch_idx ? p.cache_batch_idx[batch] : batch;
    s.k = {p.k + 2 * (row * p.k_stride.batch + head * p.k_stride.head), 2 * p.k_stride.row,
           2 * p.k_stride.batch};
    s.v = {p.v + 2 * (row * p.v_stride.batch + head * p.v_stride.head), 2 * p.v_stride.row,
           2 * p.v_stride.batch};
    return s;
  }
  __device__ __forceinline__ void main_loop(Ring& ring) {
    Base::main_loop(ring, places(), run.begin, run.end, run.length);
  }
  __device__ __forceinline__ void store() {
    const bool piece = run.slot >= 0;
    Base::merge_warps(
        p.rows,
        [&](int row, float lse) {
          if (piece) {
            p.slots.lse[row * p.slots.count + run.slot] = lse;
          } else {
            Base::store_lse(row, lse);
          }
        },
        [&](int row) {
          return piece ? reinterpret_cast<char*>(p.slots.out +
                                                 (run.slot * Tile::kBlockQ + row) * Tile::kHeadDim)
                       : Base::place_of(row);
        },
        [&](char* place, int col, const float (&v)[4]) {
          if (piece) {
            *reinterpret_cast<float4*>(place + 4 * col) = make_float4(v[0], v[1], v[2], v[3]);
          } else {
            Base::store_out(place, col, v);
          }
        });
  }
};

template <class Tile, DType kDType, bool kPaged>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    decode_dealt_kernel(const __grid_constant__ DecodeDealtArgs p) {
  extern __shared__ __align__(128) char smem[];
  __shared__ bool last;
  using Block = DecodeDealtBlock<Tile, kDType, kPaged>;
  typename Block::Ring ring(ptx::smem_addr(smem) + Tile::kBytesQ);
  DealtWalk<Tile> walk(p);
  DealtRun run;
  bool found = walk.start(run);
#pragma unroll 1
  for (; found || walk.next(run); found = false) {
    Block block(p, run, ptx::smem_addr(smem));
    block.main_loop(ring);
    block.store();
    if (run.slot >= 0) {
      const DealtPieces<Tile> pieces = walk.pieces(run);
      if (is_last_piece(&arrivals[p.counters][pieces.first_share], pieces.parts, last)) {
        block.merge_parts(pieces);
      }
    }
    __syncthreads();  // shared memory may be written again
  }
}

}  // namespace flash_cuda::sm80
