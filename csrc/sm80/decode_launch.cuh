// Kernel, tile, variant and grid of a split-KV call.
#pragma once

#include "common/launch.h"
#include "sm80/decode.h"
#include "sm80/decode_kernel.cuh"
#include "sm80/decode_merge.cuh"
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

// Thread blocks to deal `units` blocks of keys out to: as many as the device holds; where that
// leaves few units to each, one an SM, since every one makes a piece to be merged; never for one
// unit.
inline int64_t wanted_shares(int64_t units, int num_sms, int resident) {
  constexpr int kFewUnits = 4;
  const int64_t all = int64_t{num_sms} * resident;
  return min_of(units < kFewUnits * all ? num_sms : all, ceil_div(units, int64_t{2}));
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

template <class Tile>
DecodeGrid decode_grid(const FwdParams& p) {
  DecodeGrid g{};
  g.group = static_cast<int>(decode_group(p));
  g.heads = p.num_heads_q / g.group;
  const int64_t rows = int64_t{p.seqlen_q} * g.group;
  g.tiles =
      static_cast<int>(p.cu_seqlens_q ? packed_blocks(p.total_q * g.group, p.batch, Tile::kBlockQ)
                                      : ceil_div(rows, int64_t{Tile::kBlockQ}));
  g.rows = static_cast<int>(min_of(rows, int64_t{Tile::kBlockQ}));
  if (p.dealt_out) {
    const int64_t places = int64_t{g.tiles} * (p.cu_seqlens_q ? 1 : p.batch) * g.heads;
    const int64_t units = places * ceil_div(p.seqlen_kv, Tile::kBlockKV);  // at most
    const int64_t slots = wanted_shares(units, p.num_sms, resident_blocks<Tile>(p));
    g.shares = static_cast<int>(max_of(min_of(units, slots), int64_t{1}));
    if (have_equal_tiles(p) && places > 0) {
      g.shares = best_shares(places, units, slots);
      g.blocks = ceil_div(p.seqlen_kv, Tile::kBlockKV);
      if (g.shares % places == 0) {
        g.shares_a_tile = static_cast<int>(g.shares / places);
        g.deal = Deal::make_rounds(g.blocks, g.shares_a_tile);
      } else {
        g.deal = Deal::make(static_cast<int>(places * (g.blocks + kTileOverhead)), g.shares);
      }
    }
    g.slots = DecodeSlots::make(p.workspace, g.shares, Tile::kBlockQ, Tile::kHeadDimV);
  }
  return g;
}

inline int64_t decode_tiles(const FwdParams& p, const DecodeGrid& g) {
  return int64_t{g.tiles} * (p.cu_seqlens_q ? 1 : p.batch) * g.heads;
}

// No share ends within a tile, whatever the device finds.
inline bool cuts_no_tile(const FwdParams& p, const DecodeGrid& g) {
  return g.shares_a_tile == 1 || (have_equal_tiles(p) && decode_tiles(p, g) % g.shares == 0);
}

template <DType kDType>
void launch_merge(const FwdParams& p, const DecodeGrid& g, cudaStream_t stream) {
  if (cuts_no_tile(p, g)) return;
  const int step = max_of(g.shares_a_tile, 1);  // only the first share of a tile can cut it
  launch_kernel(decode_merge_kernel<kDType>,
                {dim3(g.shares / step * g.rows), kMergeThreads, /*smem_bytes=*/0}, stream,
                DecodeMerge::make(p, g));
}

template <class Tile, DType kDType, auto kKernel>
void launch_decode_kernel(const FwdParams& p, cudaStream_t stream) {
  const DecodeGrid g = decode_grid<Tile>(p);
  const int64_t blocks = g.shares > 0 ? g.shares : decode_tiles(p, g) * p.num_splits;
  if (blocks <= 0) return;
  if (blocks > 0x7fffffff || decode_tiles(p, g) > 0x7fffffff) {
    throw std::runtime_error("the problem needs more than 2^31 - 1 thread blocks");
  }
  static std::atomic<uint64_t> allowed{0};
  allow_dynamic_smem(kKernel, Tile::kSmemBytes, allowed);
  launch_kernel(kKernel, {dim3(static_cast<unsigned>(blocks)), Tile::kThreads, Tile::kSmemBytes},
                stream, p, g);
  if (g.shares > 0) launch_merge<kDType>(p, g, stream);
}

// Calls visit(tile, is_stream) for the tile and kernel that serve the call.
template <int kHeadDim, int kHeadDimV, bool kLarge, class Visit>
void visit_decode_tile(const FwdParams& p, Visit visit) {
  const int64_t rows = p.seqlen_q * decode_group(p);
  // seqlen_q of packed rows depends on the whole batch, but with a fixed size of the parts the
  // result of a sequence must not: there packed rows always take the same tile.
  const bool same_tile = p.split_size > 0 && p.cu_seqlens_q;
  if (!same_tile && is_plain_decode(p)) {
    if (rows <= 16) return visit(StreamTile<kHeadDim, kHeadDimV, kLarge, 1>{}, std::true_type{});
    if constexpr (kHeadDimV <= 128) {
      if (rows <= 32) return visit(StreamTile<kHeadDim, kHeadDimV, kLarge, 2>{}, std::true_type{});
    }
  }
  if (!same_tile && rows <= 16) {
    return visit(DecodeTile<kHeadDim, kHeadDimV, kLarge, 1>{}, std::false_type{});
  }
  visit(DecodeTile<kHeadDim, kHeadDimV, kLarge, 4>{}, std::false_type{});
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
  visit_decode_size<kHeadDim, kHeadDimV>(p, [&](auto tile, auto) {
    using Tile = decltype(tile);
    const DecodeGrid g = decode_grid<Tile>(p);
    bytes = DecodeSlots::bytes(g.shares, Tile::kBlockQ, Tile::kHeadDimV);
  });
  return bytes;
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_decode(const FwdParams& params, cudaStream_t stream) {
  FwdParams p = params;
  p.unaligned = is_unaligned(p) || (p.qv && is_unaligned(p.qv, p.qv_stride));
  visit_decode_size<kHeadDim, kHeadDimV>(p, [&](auto tile, auto is_stream) {
    using Tile = decltype(tile);
    if constexpr (decltype(is_stream)::value) {
      launch_decode_kernel<Tile, kDType, decode_stream_kernel<Tile, kDType>>(p, stream);
    } else {
      if constexpr (Tile::kRowWarps > 1) {  // fewer rows are the stream kernel's
        if (is_plain_decode(p)) {
          constexpr auto kPlain = decode_kernel<Tile, kDType, Variant::kPlain>;
          return launch_decode_kernel<Tile, kDType, kPlain>(p, stream);
        }
      }
      constexpr auto kGeneral = decode_kernel<Tile, kDType, Variant::kGeneral>;
      launch_decode_kernel<Tile, kDType, kGeneral>(p, stream);
    }
  });
}

}  // namespace flash_cuda::sm80
