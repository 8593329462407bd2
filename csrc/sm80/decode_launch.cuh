// Kernel, tile, variant and grid of a split-KV call.
#pragma once

#include "common/launch.h"
#include "common/launch_slots.h"
#include "sm80/decode.h"
#include "sm80/decode_dealt.cuh"
#include "sm80/decode_even.cuh"
#include "sm80/decode_kernel.cuh"
#include "sm80/decode_stream.cuh"
#include "sm80/variant.h"

namespace flash_cuda::sm80 {

// Pages are served by the plain variants too: they are what decoding mostly reads.
inline bool is_plain_decode(const FwdParams& p) {
  FwdParams f = p;
  f.block_table = nullptr;
  return is_plain(f) && !p.qv;
}

inline int64_t decode_group(const FwdParams& p) {
  return p.pack_gqa ? p.num_heads_q / p.num_heads_kv : 1;
}

// Thread blocks that an SM holds at a time, as far as shared memory and the kernel say.
template <class Tile>
int resident_blocks(const FwdParams& p) {
  constexpr int kReserved = 1024;  // bytes of every thread block
  return min_of(Tile::kMinBlocks,
                max_of((p.max_smem_per_block + kReserved) / (Tile::kSmemBytes + kReserved), 1));
}

// Thread blocks to deal `units` blocks of keys out to: as many as the device holds, or fewer
// (kFewUnits); never for one unit.
inline int64_t wanted_shares(int64_t units, int num_sms, int resident) {
  const int64_t all = min_of(int64_t{num_sms} * resident, int64_t{kMostShares});
  return min_of(units < kFewUnits * all ? num_sms : all, ceil_div(units, int64_t{2}));
}

// So many equal tiles that thread blocks of one each, as SMs get free, keep them all busy: several
// a SM, and little left over in the end.
inline bool fills_waves(int64_t tiles, int num_sms) {
  const int64_t waves = ceil_div(tiles, int64_t{num_sms});
  return waves >= 4 && 16 * tiles >= 15 * waves * num_sms;
}

// Known on the host: no tensor of lengths says otherwise.
inline bool have_equal_lengths(const FwdParams& p) {
  return !p.cu_seqlens_q && !p.seqused_q && !p.cu_seqlens_k && !p.seqused_k && !p.leftpad_k;
}

// All tiles have one number of blocks of keys, that of seqlen_kv.
inline bool have_equal_tiles(const FwdParams& p) {
  return have_equal_lengths(p) && p.window_left >= kUnbounded && p.attention_chunk == 0 &&
         !p.top_left;
}

inline int arrivals_slot(cudaStream_t stream) {
  static LaunchSlots slots(kStreamArrivals, kArrivals);
  return slots.slot_of(stream);
}

// The tiles of a call.
template <class Tile>
DecodeGrid tile_grid(const FwdParams& p) {
  DecodeGrid g{};
  g.group = static_cast<int>(decode_group(p));
  g.heads = p.num_heads_q / g.group;
  const int64_t rows = int64_t{p.seqlen_q} * g.group;
  g.tiles =
      static_cast<int>(p.cu_seqlens_q ? packed_blocks(p.total_q * g.group, p.batch, Tile::kBlockQ)
                                      : ceil_div(rows, int64_t{Tile::kBlockQ}));
  g.rows = static_cast<int>(min_of(rows, int64_t{Tile::kBlockQ}));
  return g;
}
inline int64_t decode_tiles(const FwdParams& p, const DecodeGrid& g) {
  return int64_t{g.tiles} * (p.cu_seqlens_q ? 1 : p.batch) * g.heads;
}

// As many shares as tiles of seqlen_kv keys want; returns how many would be welcome.
template <class Tile>
int64_t deal_by_lengths(const FwdParams& p, DecodeGrid& g) {
  const int64_t units = decode_tiles(p, g) * ceil_div(p.seqlen_kv, Tile::kBlockKV);  // at most
  const int64_t wanted = wanted_shares(units, p.num_sms, resident_blocks<Tile>(p));
  g.shares = static_cast<int>(max_of(min_of(units, wanted), int64_t{1}));
  g.slots = DecodeSlots::make(p.workspace, g.shares, Tile::kBlockQ, Tile::kHeadDimV);
  return wanted;
}

template <class Tile>
DecodeGrid decode_grid(const FwdParams& p) {
  DecodeGrid g = tile_grid<Tile>(p);
  if (!p.dealt_out) return g;
  const int64_t wanted = deal_by_lengths<Tile>(p, g), places = decode_tiles(p, g);
  if (have_equal_tiles(p) && places > 0) {
    g.blocks = ceil_div(p.seqlen_kv, Tile::kBlockKV);
    g.shares = best_shares(places, places * g.blocks, wanted);
    if (g.shares % places == 0) {
      g.shares_a_tile = round_parts(static_cast<int>(g.shares / places));
      g.shares = static_cast<int>(places) * g.shares_a_tile;
      g.deal = Deal::make_rounds(g.blocks, g.shares_a_tile);
    } else {
      g.deal = Deal::make(static_cast<int>(places * (g.blocks + kTileOverhead)), g.shares);
    }
    g.slots = DecodeSlots::make(p.workspace, g.shares, Tile::kBlockQ, Tile::kHeadDimV);
  }
  return g;
}

// What the lean kernels serve with this tile: dense, one tile of rows for a KV head, no window.
template <class Tile>
bool is_lean(const FwdParams& p) {
  return p.dealt_out && !p.cu_seqlens_q && !p.seqused_q && !p.cu_seqlens_k && !p.leftpad_k &&
         p.window_left >= kUnbounded && p.attention_chunk == 0 && !p.top_left &&
         p.head_dim == p.head_dim_v && (p.num_heads_q == p.num_heads_kv || p.pack_gqa) &&
         p.seqlen_q * decode_group(p) <= Tile::kBlockQ;
}
// The same where all tiles are alike in every way; shares_a_tile is 0 where they are not cut alike.
template <class Tile>
DecodeGrid even_grid(const FwdParams& p) {
  DecodeGrid g = decode_grid<Tile>(p);
  const int64_t tiles = decode_tiles(p, g);
  if (fills_waves(tiles, p.num_sms)) {
    g.shares = static_cast<int>(tiles);
    g.shares_a_tile = 1;
    g.deal = Deal::make_rounds(g.blocks, 1);
  }
  return g;
}
// Whether all tiles are alike in every way, and each is cut into the same number of parts.
template <class Tile>
bool is_even(const FwdParams& p) {
  constexpr int kMostInGrid = 65535;
  return is_lean<Tile>(p) && have_equal_tiles(p) && !p.block_table && !p.cache_batch_idx &&
         p.batch <= kMostInGrid && p.num_heads_kv <= kMostInGrid &&
         even_grid<Tile>(p).shares_a_tile > 0;
}

inline void set_lean_args(DecodeLeanArgs& e, const FwdParams& p, const DecodeGrid& g,
                          cudaStream_t stream) {
  e.q = static_cast<const char*>(p.q);
  e.k = static_cast<const char*>(p.k);
  e.v = static_cast<const char*>(p.v);
  e.out = static_cast<char*>(p.out);
  e.lse = p.lse;
  e.q_stride = p.q_stride;
  e.k_stride = p.k_stride;
  e.v_stride = p.v_stride;
  e.out_stride = p.out_stride;
  e.lse_batch_stride = p.lse_batch_stride;
  e.lse_head_stride = p.lse_head_stride;
  e.seqlen_kv = p.seqlen_kv;
  e.head_dim = p.head_dim;
  e.diagonal = max_of(p.seqlen_q - 1 - p.window_right, 0);
  e.group = g.group;
  e.inverse_group = static_cast<int>(ceil_div(1 << 16, g.group));
  e.rows = g.rows;
  e.softmax_scale = p.softmax_scale;
  e.counters = arrivals_slot(stream);
}
template <class Tile, class Args>
void launch_lean_kernel(void (*kernel)(Args), dim3 grid, cudaStream_t stream, const Args& args,
                        std::atomic<uint64_t>& allowed) {
  allow_dynamic_smem(kernel, Tile::kSmemBytes, allowed);
  launch_kernel(kernel, {grid, Tile::kThreads, Tile::kSmemBytes}, stream, args);
}
template <class Tile, DType kDType>
void launch_even(const FwdParams& p, cudaStream_t stream) {
  const DecodeGrid g = even_grid<Tile>(p);
  DecodeEvenArgs args;
  set_lean_args(args, p, g, stream);
  args.each = g.deal.each;
  args.more = g.deal.more;
  args.piece_out = g.slots.out;
  args.piece_lse = g.slots.out + int64_t{g.shares} * g.rows * Tile::kHeadDimV;
  static std::atomic<uint64_t> allowed{0};
  launch_lean_kernel<Tile>(decode_even_kernel<Tile, kDType>,
                           dim3(g.shares_a_tile, g.heads, p.batch), stream, args, allowed);
}

// Lengths are not known: as many thread blocks as seqlen_kv might want.
template <class Tile>
DecodeGrid dealt_grid(const FwdParams& p) {
  DecodeGrid g = tile_grid<Tile>(p);
  deal_by_lengths<Tile>(p, g);
  return g;
}
template <class Tile, DType kDType, bool kPaged>
void launch_dealt(const FwdParams& p, cudaStream_t stream) {
  const DecodeGrid g = dealt_grid<Tile>(p);
  const int64_t tiles = decode_tiles(p, g);
  if (tiles == 0) return;
  DecodeDealtArgs args;
  set_lean_args(args, p, g, stream);
  args.lengths = p.seqused_k;
  args.cache_batch_idx = p.cache_batch_idx;
  args.block_table = p.block_table;
  args.block_table_stride = p.block_table_stride;
  args.page_size = p.page_size;
  args.batch = p.batch;
  args.heads = g.heads;
  args.fewer_shares = min_of(g.shares, p.num_sms);
  args.equal_shares = best_shares(tiles, int64_t{kUnbounded}, g.shares);
  args.equal_parts =
      args.equal_shares % tiles == 0 ? round_parts(static_cast<int>(args.equal_shares / tiles)) : 0;
  args.inverse_parts = ceil_div(1 << kInverseShift, max_of(args.equal_parts, 1));
  args.inverse_heads = ceil_div(1 << kInverseShift, g.heads);
  args.inverse_blocks = 0xffffffffu / static_cast<unsigned>(max_of(args.equal_parts, 1));
  args.slots = g.slots;
  static std::atomic<uint64_t> allowed{0};
  launch_lean_kernel<Tile>(decode_dealt_kernel<Tile, kDType, kPaged>, dim3(g.shares), stream, args,
                           allowed);
}

template <class Tile, auto kKernel>
void launch_decode_kernel(const FwdParams& p, cudaStream_t stream) {
  DecodeGrid g = decode_grid<Tile>(p);
  if (g.shares > 0) g.counters = arrivals_slot(stream);
  const int64_t blocks = g.shares > 0 ? g.shares : decode_tiles(p, g) * p.num_splits;
  if (blocks <= 0) return;
  if (blocks > 0x7fffffff || decode_tiles(p, g) > 0x7fffffff) {
    throw std::runtime_error("the problem needs more than 2^31 - 1 thread blocks");
  }
  static std::atomic<uint64_t> allowed{0};
  allow_dynamic_smem(kKernel, Tile::kSmemBytes, allowed);
  launch_kernel(kKernel, {dim3(static_cast<unsigned>(blocks)), Tile::kThreads, Tile::kSmemBytes},
                stream, p, g);
}

enum class DecodeKind { kEven, kDealt, kStream, kBlock };
template <DecodeKind kKind>
using DecodeKindTag = std::integral_constant<DecodeKind, kKind>;

// Calls visit(tile, kind) for the tile and kernel that serve a plain call of at most 32 rows.
template <int kHeadDim, bool kLarge, int kRowTiles, class Visit>
void visit_stream_tile(const FwdParams& p, Visit visit) {
  using Even = DecodeKindTag<DecodeKind::kEven>;
  using Dealt = DecodeKindTag<DecodeKind::kDealt>;
  using Tile = StreamTile<kHeadDim, kHeadDim, kLarge, kRowTiles>;
  if constexpr (kLarge && kHeadDim <= 128) {
    using Few = FewTile<kHeadDim, kRowTiles>;
    const int64_t tiles = int64_t{p.batch} * p.num_heads_kv;
    if (p.max_smem_per_block >= Few::kSmemBytes && is_lean<Few>(p)) {
      const bool few = tiles < p.num_sms;
      if ((few || fills_waves(tiles, p.num_sms)) && is_even<Few>(p)) return visit(Few{}, Even{});
      if (few) return visit(Few{}, Dealt{});
    }
  }
  if (is_even<Tile>(p)) return visit(Tile{}, Even{});
  if (is_lean<Tile>(p)) return visit(Tile{}, Dealt{});
  visit(Tile{}, DecodeKindTag<DecodeKind::kStream>{});
}

// The same for any call.
template <int kHeadDim, int kHeadDimV, bool kLarge, class Visit>
void visit_decode_tile(const FwdParams& p, Visit visit) {
  const int64_t rows = p.seqlen_q * decode_group(p);
  // seqlen_q of packed rows depends on the whole batch, but with a fixed size of the parts the
  // result of a sequence must not: there packed rows always take the same tile.
  const bool same_tile = p.split_size > 0 && p.cu_seqlens_q;
  if (!same_tile && is_plain_decode(p)) {
    if (rows <= 16) return visit_stream_tile<kHeadDim, kLarge, 1>(p, visit);
    if constexpr (kHeadDimV <= 128) {
      if (rows <= 32) return visit_stream_tile<kHeadDim, kLarge, 2>(p, visit);
    }
  }
  using Block = DecodeKindTag<DecodeKind::kBlock>;
  if (!same_tile && rows <= 16) {
    return visit(DecodeTile<kHeadDim, kHeadDimV, kLarge, 1>{}, Block{});
  }
  visit(DecodeTile<kHeadDim, kHeadDimV, kLarge, 4>{}, Block{});
}

template <int kHeadDim, int kHeadDimV, class Visit>
void visit_decode_size(const FwdParams& p, Visit visit) {
  using Large = DecodeTile<kHeadDim, kHeadDimV, true, 1>;
  using Small = DecodeTile<kHeadDim, kHeadDimV, false, 1>;
  if constexpr (Large::kSmemBytes > Small::kSmemBytes) {
    if (p.max_smem_per_block < kLargeSmem) {
      return visit_decode_tile<kHeadDim, kHeadDimV, false>(p, visit);
    }
  }
  visit_decode_tile<kHeadDim, kHeadDimV, true>(p, visit);
}

template <int kHeadDim, int kHeadDimV>
size_t decode_workspace_bytes(const FwdParams& p) {
  if (!p.dealt_out) return 0;
  size_t bytes = 0;
  visit_decode_size<kHeadDim, kHeadDimV>(p, [&](auto tile, auto kind) {
    using Tile = decltype(tile);
    const DecodeGrid g = kind.value == DecodeKind::kDealt  ? dealt_grid<Tile>(p)
                         : kind.value == DecodeKind::kEven ? even_grid<Tile>(p)
                                                           : decode_grid<Tile>(p);
    // Parts of one have nothing to merge.
    if (g.shares_a_tile != 1) bytes = DecodeSlots::bytes(g.shares, Tile::kBlockQ, Tile::kHeadDimV);
  });
  return bytes;
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_decode(const FwdParams& params, cudaStream_t stream) {
  FwdParams p = params;
  p.unaligned = is_unaligned(p) || (p.qv && is_unaligned(p.qv, p.qv_stride));
  visit_decode_size<kHeadDim, kHeadDimV>(p, [&](auto tile, auto kind) {
    using Tile = decltype(tile);
    if constexpr (kind.value == DecodeKind::kEven) {
      launch_even<Tile, kDType>(p, stream);
    } else if constexpr (kind.value == DecodeKind::kDealt) {
      if (p.block_table) {
        launch_dealt<Tile, kDType, true>(p, stream);
      } else {
        launch_dealt<Tile, kDType, false>(p, stream);
      }
    } else if constexpr (kind.value == DecodeKind::kStream) {
      launch_decode_kernel<Tile, decode_stream_kernel<Tile, kDType>>(p, stream);
    } else {
      if constexpr (Tile::kRowWarps > 1) {  // fewer rows are the stream kernel's
        if (is_plain_decode(p)) {
          constexpr auto kPlain = decode_kernel<Tile, kDType, Variant::kPlain>;
          return launch_decode_kernel<Tile, kPlain>(p, stream);
        }
      }
      constexpr auto kGeneral = decode_kernel<Tile, kDType, Variant::kGeneral>;
      launch_decode_kernel<Tile, kGeneral>(p, stream);
    }
  });
}

}  // namespace flash_cuda::sm80
