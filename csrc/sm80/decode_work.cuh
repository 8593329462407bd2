// Which keys of which tile a thread block of the split-KV kernels works on, and where its result
// goes.
//
// A call is either cut into a number of parts that the caller asked for, one thread block each, or
// dealt out: the blocks of keys of all tiles, in the order of sequences, tiles and heads, form one
// line of units, and every thread block of a grid that the device holds at once takes an equal run
// of it. Lengths are read on the device, so that uneven ones cost nothing and a CUDA graph may be
// replayed with others. A run holds whole tiles, which are written at once, and at most two that
// others share; those go to slots of the workspace, and the thread block that is the last to finish
// a piece of a tile puts them together (decode_merge.cuh).
#pragma once

#include "common/deal.h"
#include "common/mask.h"
#include "common/scheduler.cuh"
#include "common/seqlen.h"
#include "ptx/convert.h"

namespace flash_cuda::sm80 {

// A tile may stand in the line with more units than it has blocks of keys, as the first of them: a
// thread block that goes from one tile to the next loses about the time of so many blocks.
constexpr int kTileOverhead = 2;

// Where that leaves fewer units to each of the thread blocks that the device holds, work is dealt
// out to one an SM, since every one makes a piece to be merged.
constexpr int kFewUnits = 4;

// One part of the keys of one tile.
struct DecodeSegment {
  enum class Target { kOut, kSlot, kPart };
  int batch, head, block;  // head: of the tiles, each of `group` query heads
  int begin, end;          // keys, at most; `begin` is where a block of keys starts
  bool first;              // the tile's first keys are here
  Target target;
  int index;               // of the slot or part
  int first_share, parts;  // of a slot: which share has the tile's first keys, and of how many
};

// The workspace of a call that is dealt out. Slot 2 c holds what share c has of a tile that an
// earlier one began, slot 2 c + 1 what it has of the tile that it left to later ones.
struct DecodeSlots {
  float* out;  // (slots, block_q, width)
  float* lse;  // (block_q, slots): the pieces of a row lie side by side
  int count, block_q, width;

  FLASH_CUDA_HOST_DEVICE static DecodeSlots make(void* workspace, int shares, int block_q,
                                                 int width) {
    DecodeSlots s;
    s.count = 2 * shares;
    s.block_q = block_q;
    s.width = width;
    s.out = static_cast<float*>(workspace);
    s.lse = s.out + int64_t{s.count} * block_q * width;
    return s;
  }
  // The slot of piece i of the tile that `share` has cut.
  FLASH_CUDA_HOST_DEVICE static int slot(int share, int i) {
    return 2 * (share + i) + (i == 0 ? 1 : 0);
  }
  FLASH_CUDA_HOST_DEVICE static size_t bytes(int shares, int block_q, int width) {
    return size_t{2} * shares * block_q * (width + 1) * sizeof(float);
  }
};

// What the kernels are told beside the params.
struct DecodeGrid {
  int group;   // query heads that are rows of one tile, 1 where they are not packed
  int heads;   // tiles side by side: query heads / group
  int tiles;   // blocks of rows of a dense sequence; of all sequences where q is packed (a bound)
  int rows;    // of a tile, at most
  int blocks;  // of keys in every tile, where all are equal and known to be; else 0
  int shares;  // thread blocks that the call is dealt out to; 0: it is cut as asked
  int shares_a_tile;  // > 0: so many for each tile, all of one size; 0: as it comes
  Deal deal;          // where `blocks` is known
  DecodeSlots slots;
  int counters;  // which of the arrivals (decode_merge.cuh) the launch has
};

// The tile of a number; not valid where packed sequences leave a gap.
__device__ __forceinline__ WorkTile tile_of_number(const FwdParams& p, const DecodeGrid& g,
                                                   int block_q, int number) {
  const int place = number / g.heads, head = number - place * g.heads;
  if (p.cu_seqlens_q) {
    WorkTile tile = find_packed_block(p.cu_seqlens_q, p.batch, static_cast<int>(p.total_q), block_q,
                                      place, g.group);
    tile.head = head;
    return tile;
  }
  const int batch = place / g.tiles;
  return {batch, head, place - batch * g.tiles, true};
}

// The units of one sequence: for every block of rows and head the overhead and the blocks of keys
// that any of its rows sees, at least one, so that every tile has somebody who writes it.
struct SequenceUnits {
  int row_blocks, first_block, key_blocks, overhead;

  __device__ __forceinline__ static SequenceUnits make(const FwdParams& p, const DecodeGrid& g,
                                                       int block_q, int block_kv, int batch) {
    if (g.blocks > 0) return {g.tiles, 0, g.blocks, overhead_of(g)};  // sequences are alike
    const SeqInfo seq = seq_info_or_tail(p, batch);
    const Mask mask = Mask::make(p, seq.seqlen_q, seq.seqlen_kv);
    const int begin = seq.seqlen_q > 0 ? max(mask.kv_begin(0), 0) : 0;
    const int end = seq.seqlen_q > 0 ? mask.kv_end(seq.seqlen_q - 1) : 0;
    SequenceUnits u;
    u.row_blocks = ceil_div(seq.seqlen_q_slot * g.group, block_q);
    u.first_block = begin / block_kv;
    u.key_blocks = max(ceil_div(end, block_kv) - u.first_block, 1);
    u.overhead = overhead_of(g);
    return u;
  }
  FLASH_CUDA_HOST_DEVICE static int overhead_of(const DecodeGrid& g) {
    return g.shares_a_tile > 0 ? 0 : kTileOverhead;
  }
  __device__ __forceinline__ int count(const DecodeGrid& g) const {
    return row_blocks * g.heads * tile();
  }
  __device__ __forceinline__ int tile() const { return overhead + key_blocks; }
};

// Where a thread block stands in its walk, and the segment that it is at: in shared memory, so that
// it costs no registers of the main loops.
struct DecodeState {
  DecodeSegment segment;
  SeqInfo seq;  // of the segment
  bool more;    // there is a segment
  Deal deal;
  int batch, unit_in_batch;  // of the next unit
  int unit, end;             // in the line
  bool merges;               // this thread block puts the segment's tile together
  int scratch[32];
};

// Walks through the segments of a thread block. All of its threads call start() and next().
template <int kBlockQ, int kBlockKV, int kThreads>
struct DecodeWalk {
  static constexpr int kWarps = kThreads / 32;

  const FwdParams& p;
  const DecodeGrid& grid;
  DecodeState& state;

  __device__ __forceinline__ void start() const {
    if (grid.shares > 0 && grid.blocks == 0) {
      find_start(p.batch + (p.cu_seqlens_q ? 1 : 0));  // and the rows behind the last sequence
    } else if (threadIdx.x == 0) {
      state.unit = 0;
      state.end = 1;
      if (grid.shares > 0 && grid.shares_a_tile == 0) {
        state.deal = grid.deal;
        state.unit = grid.deal.begin(blockIdx.x);
        state.end = grid.deal.begin(blockIdx.x + 1);
        const int each = grid.tiles * grid.heads * (SequenceUnits::overhead_of(grid) + grid.blocks);
        state.batch = state.unit / each;
        state.unit_in_batch = state.unit - state.batch * each;
      }
    }
  }
  // False after the last segment. The one before has been read by all threads.
  __device__ __forceinline__ bool next() const {
    if (threadIdx.x < 32) {
      __syncwarp();  // thread 0 has written
      DecodeState s = state;
      __syncwarp();  // every lane has read
      s.more = grid.shares == 0         ? next_part(s)
               : grid.shares_a_tile > 0 ? next_of_tile(s)
                                        : next_of_share(s);
      if (threadIdx.x == 0) {
        state.segment = s.segment;
        state.seq = seq_info_or_tail(p, s.more ? s.segment.batch : 0);
        state.more = s.more;
        state.batch = s.batch;
        state.unit_in_batch = s.unit_in_batch;
        state.unit = s.unit;
      }
    }
    __syncthreads();
    return state.more;
  }

 private:
  __device__ __forceinline__ int units_of(int b) const {
    return SequenceUnits::make(p, grid, kBlockQ, kBlockKV, b).count(grid);
  }
  // Every thread adds up a run of sequences; a scan over the threads finds who has the first unit.
  __device__ __forceinline__ void find_start(int sequences) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int run = ceil_div(sequences, kThreads);
    const int first = min(static_cast<int>(threadIdx.x) * run, sequences);
    const int last = min(first + run, sequences);
    int mine = 0;
    for (int b = first; b < last; ++b) mine += units_of(b);
    int before = mine;  // of this warp, up to and with this thread
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, before, i);
      if (lane >= i) before += other;
    }
    if (lane == 31) state.scratch[warp] = before;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before += total;
      total += state.scratch[w];
    }
    before -= mine;
    const Deal deal = Deal::make(total, grid.shares);
    const int unit = deal.begin(blockIdx.x);
    if (threadIdx.x == 0) {
      state.deal = deal;
      state.unit = unit;
      state.end = deal.begin(blockIdx.x + 1);
    }
    if (unit >= before && unit < before + mine) {
      state.batch = first;  // next() goes on to the sequence that has it
      state.unit_in_batch = unit - before;
    }
    __syncthreads();
  }
  __device__ __forceinline__ bool next_of_share(DecodeState& w) const {
    DecodeSegment& s = w.segment;
    while (w.unit < w.end) {
      const SequenceUnits u = SequenceUnits::make(p, grid, kBlockQ, kBlockKV, w.batch);
      if (w.unit_in_batch >= u.count(grid)) {  // also past sequences without rows
        w.unit_in_batch -= u.count(grid);
        ++w.batch;
        continue;
      }
      const TileRun run = TileRun::make(w.unit_in_batch, w.end - w.unit, u.overhead, u.key_blocks);
      const int first_unit = w.unit + run.first_unit;
      w.unit += run.units;
      w.unit_in_batch += run.units;
      if (run.last <= 0) continue;  // all of it is overhead
      s.batch = w.batch;
      s.block = run.tile / grid.heads;
      s.head = run.tile - s.block * grid.heads;
      s.begin = (u.first_block + run.first) * kBlockKV;
      s.end = (u.first_block + run.last) * kBlockKV;
      s.first = run.first == 0;
      const bool whole = s.first && run.last == u.key_blocks;
      s.target = whole ? DecodeSegment::Target::kOut : DecodeSegment::Target::kSlot;
      s.index = 2 * blockIdx.x + (s.first ? 1 : 0);
      if (!whole) {
        const int unit = first_unit - run.first;  // of the tile's first block of keys
        s.first_share = w.deal.owner(unit);
        s.parts = w.deal.owner(unit + u.key_blocks - 1) - s.first_share + 1;
      }
      return true;
    }
    return false;
  }
  // The only segment of this thread block where all tiles are cut alike.
  __device__ __forceinline__ bool next_of_tile(DecodeState& w) const {
    if (w.unit >= w.end) return false;
    ++w.unit;
    DecodeSegment& s = w.segment;
    const int parts = grid.shares_a_tile, number = blockIdx.x / parts;
    const int part = blockIdx.x - number * parts, place = number / grid.heads;
    s.batch = place / grid.tiles;
    s.block = place - s.batch * grid.tiles;
    s.head = number - place * grid.heads;
    const int begin = part * grid.deal.each + min(part, grid.deal.more);
    s.begin = begin * kBlockKV;
    s.end = (begin + grid.deal.each + (part < grid.deal.more ? 1 : 0)) * kBlockKV;
    s.first = part == 0;
    s.target = parts == 1 ? DecodeSegment::Target::kOut : DecodeSegment::Target::kSlot;
    s.index = 2 * blockIdx.x + (s.first ? 1 : 0);
    s.first_share = blockIdx.x - part;
    s.parts = parts;
    return true;
  }
  // The only segment of this thread block where the caller has said how to cut.
  __device__ __forceinline__ bool next_part(DecodeState& w) const {
    if (w.unit >= w.end) return false;
    ++w.unit;
    DecodeSegment& s = w.segment;
    const int number = blockIdx.x / p.num_splits;
    const WorkTile tile = tile_of_number(p, grid, kBlockQ, number);
    // Rows of no sequence: the caller has filled their lse.
    if (!tile.valid || tile.batch == p.batch) return false;
    s.batch = tile.batch;
    s.head = tile.head;
    s.block = tile.block;
    s.target = DecodeSegment::Target::kPart;
    s.index = blockIdx.x - number * p.num_splits;
    s.first = s.index == 0;
    cut_part(s);
    return true;
  }
  __device__ __forceinline__ void cut_part(DecodeSegment& s) const {
    const SeqInfo seq = seq_info(p, s.batch);
    const Mask mask = Mask::make(p, seq.seqlen_q, seq.seqlen_kv);
    const int row0 = s.block * kBlockQ, rows = seq.seqlen_q * grid.group;
    s.begin = s.end = 0;
    if (row0 >= rows) return;
    const int begin = max(mask.kv_begin(row0 / grid.group), 0);
    const int end = mask.kv_end((min(row0 + kBlockQ, rows) - 1) / grid.group);
    if (p.split_size > 0) {
      const int64_t low = static_cast<int64_t>(s.index) * p.split_size;
      const int64_t high = low + p.split_size;
      if (low >= end || high <= begin) return;
      s.begin = static_cast<int>(low);
      s.end = static_cast<int>(high < end ? high : end);
    } else {
      const int first = begin / kBlockKV, blocks = ceil_div(end, kBlockKV) - first;
      const int each = ceil_div(max(blocks, 0), p.num_splits);
      if (s.index * each >= blocks) return;
      s.begin = (first + s.index * each) * kBlockKV;
      s.end = s.begin + each * kBlockKV;
    }
  }
};

// The rows of a segment's tile: what they see of it, and where their results go.
template <int kBlockQ, int kBlockKV, DType kDType>
struct DecodeTileRows {
  const FwdParams& p;
  const DecodeGrid& grid;
  const DecodeSegment& segment;  // these two in shared memory
  const SeqInfo& seq;
  const Mask mask;

  __device__ __forceinline__ DecodeTileRows(const FwdParams& params, const DecodeGrid& g,
                                            const DecodeState& state)
      : p(params),
        grid(g),
        segment(state.segment),
        seq(state.seq),
        mask(Mask::make(params, seq.seqlen_q, seq.seqlen_kv)) {}

  __device__ __forceinline__ int row0() const { return segment.block * kBlockQ; }
  __device__ __forceinline__ int first_head() const { return segment.head * grid.group; }
  __device__ __forceinline__ int kv_head() const {
    return grid.heads == p.num_heads_kv ? segment.head
                                        : first_head() / (p.num_heads_q / p.num_heads_kv);
  }
  __device__ __forceinline__ int query(int row) const { return (row0() + row) / grid.group; }
  __device__ __forceinline__ int head(int row) const {
    return first_head() + (row0() + row) - query(row) * grid.group;
  }
  // Rows of q from row0 on that count, heads counted apart.
  __device__ __forceinline__ int rows_left() const { return seq.seqlen_q * grid.group - row0(); }

  // The keys of the segment that the tile sees, and those that all of its rows see.
  struct Keys {
    int begin, end, full_begin, full_end;
  };
  __device__ __forceinline__ Keys keys() const {
    if (rows_left() <= 0) return {0, 0, 0, 0};
    const int q_first = query(0), q_last = query(min(kBlockQ, rows_left()) - 1);
    const int skipped = max(mask.kv_begin(q_first) - segment.begin, 0) / kBlockKV * kBlockKV;
    Keys k;
    k.begin = segment.begin + skipped;
    k.end = min(segment.end, mask.kv_end(q_last));
    k.full_begin = mask.kv_begin(q_last);
    k.full_end = min(mask.kv_end(q_first), k.end);
    return k;
  }

  __device__ __forceinline__ void store_lse(int row, float lse) const {
    const int q = query(row);
    if (q >= seq.seqlen_q) lse = -INFINITY;
    if (segment.target == DecodeSegment::Target::kSlot) {
      if (row >= grid.rows) return;
      grid.slots.lse[int64_t{row} * grid.slots.count + segment.index] = lse;
      return;
    }
    if (q >= seq.seqlen_q_slot) return;
    if (segment.target == DecodeSegment::Target::kOut) {
      p.lse[seq.q_batch * p.lse_batch_stride + head(row) * p.lse_head_stride + seq.q_row0 + q] =
          lse;
    } else {
      p.lse_partial[segment.index * p.lse_partial_split_stride +
                    seq.q_batch * p.lse_partial_batch_stride +
                    head(row) * p.lse_partial_head_stride + seq.q_row0 + q] = lse;
    }
  }
  // Where the output of a row goes.
  struct RowPlace {
    char* at;   // of column 0; null: nowhere
    bool wide;  // fp32, else 16-bit
    bool zero;  // the row does not count
    int width;  // columns that there are
  };
  __device__ __forceinline__ RowPlace place_of(int row) const {
    const int q = query(row);
    const int64_t q_row = seq.q_row0 + static_cast<int64_t>(q);
    RowPlace r{nullptr, true, q >= seq.seqlen_q, p.head_dim_v};
    if (segment.target == DecodeSegment::Target::kSlot) {
      if (row >= grid.rows) return r;
      const int64_t at = (int64_t{segment.index} * kBlockQ + row) * grid.slots.width;
      r.at = reinterpret_cast<char*>(grid.slots.out + at);
      r.width = grid.slots.width;
    } else if (segment.target == DecodeSegment::Target::kOut) {
      if (q >= seq.seqlen_q_slot) return r;
      r.at = static_cast<char*>(p.out) +
             2 * (seq.q_batch * p.out_stride.batch + q_row * p.out_stride.row +
                  head(row) * p.out_stride.head);
      r.wide = false;
    } else if (!r.zero) {
      r.at = reinterpret_cast<char*>(p.out_partial + segment.index * p.out_partial_split_stride +
                                     seq.q_batch * p.out_partial_stride.batch +
                                     q_row * p.out_partial_stride.row +
                                     head(row) * p.out_partial_stride.head);
    }
    return r;
  }
  // Columns [col, col + kCount) of a row.
  template <int kCount>
  __device__ __forceinline__ static void store_out(const RowPlace& r, int col,
                                                   const float (&value)[kCount]) {
    static_assert(kCount == 2 || kCount == 4);
    if (!r.at || col >= r.width) return;
    uint32_t w[kCount];
    if (r.wide) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) w[i] = r.zero ? 0 : __float_as_uint(value[i]);
      if constexpr (kCount == 2) {
        *reinterpret_cast<uint2*>(r.at + 4 * col) = make_uint2(w[0], w[1]);
      } else {
        *reinterpret_cast<uint4*>(r.at + 4 * col) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        w[i] = r.zero ? 0 : ptx::pack<kDType>(value[2 * i], value[2 * i + 1]);
      }
      if constexpr (kCount == 2) {
        *reinterpret_cast<uint32_t*>(r.at + 2 * col) = w[0];
      } else {
        *reinterpret_cast<uint2*>(r.at + 2 * col) = make_uint2(w[0], w[1]);
      }
    }
  }
  // A part without keys is known by its lse; only a sink makes it count.
  __device__ __forceinline__ bool wants_out(bool has_keys) const {
    return has_keys || segment.target != DecodeSegment::Target::kPart || (p.sink && segment.first);
  }
};

}  // namespace flash_cuda::sm80
