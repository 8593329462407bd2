// Launch of the forward kernel, with the tile that fwd_variants.h has for the call.
#pragma once

#include "common/launch.h"
#include "common/launch_slots.h"
#include "common/log2.h"
#include "sm90/fwd.h"
#include "sm90/fwd_heights.h"
#include "sm90/fwd_store.cuh"
#include "sm90/fwd_variants.h"
#include "sm90/tile_counter.h"

namespace flash_cuda::sm90 {

inline bool has_diagonal(const FwdParams& p) {
  return p.window_right < kUnbounded || p.window_left < kUnbounded || p.attention_chunk > 0;
}

// Below a diagonal the last sections are walked as one, so that a launch ends with short tiles: a
// section that is begun with its longest tiles while others end leaves SMs idle. With many tiles a
// head sections are larger.
constexpr int kManyQBlocks = 16, kJoinedSections = 3;
// The same where a head ends with lower tiles.
constexpr int kJoinedLow = 2;

// (batch, head) pairs that are walked together, whole groups: their tiles fill the device so often.
inline int section_that_fills(const FwdParams& p, int q_blocks, int waves) {
  const int group = p.num_heads_q / p.num_heads_kv;
  const int pairs = waves * p.num_sms / max_of(q_blocks, 1);
  return max_of(ceil_div(pairs, group), 1) * group;
}

// The copy engine reads a bias whose rows are whole 16-byte units apart, or one row for all
// queries.
inline bool bias_map_serves(const FwdParams& p) {
  const int bytes = p.bias_dtype == DType::kFloat32 ? 4 : 2;
  const auto fits = [bytes](int64_t stride) {
    return stride >= 0 && stride * bytes % 16 == 0 && stride < (int64_t(1) << 33);
  };
  return p.bias && p.bias_col_stride == 1 && !p.cu_seqlens_q && !p.cu_seqlens_k &&
         reinterpret_cast<uintptr_t>(p.bias) % 16 == 0 && fits(p.bias_row_stride) &&
         fits(p.bias_head_stride) && fits(p.bias_batch_stride);
}

inline void set_bias_map(FwdArgs& args, int panels) {
  const FwdParams& p = args.params;
  if (!bias_map_serves(p) || (p.bias_dtype == DType::kFloat32 && panels < 2)) return;
  args.bias_rows = p.bias_row_stride ? 64 : 1;
  args.bias_map = scores_tensor_map(
      {p.bias, p.bias_batch_stride, p.bias_head_stride, p.bias_row_stride, p.bias_dtype}, p,
      args.bias_rows);
}

inline void join_last_sections(FwdArgs& args, int count) {
  const int sections = ceil_div(args.params.batch * args.params.num_heads_q, args.section);
  args.joined_from = max_of(sections - count, 0) * args.section;
}

// Where rows are no multiple of a tile's, and where `tall_tiles` says so: low tiles, see FwdArgs.
inline void shift_rows(FwdArgs& args, bool full, int tall_tiles, int block_q) {
  const FwdParams& p = args.params;
  if (!full) {
    args.missing_rows = args.q_blocks * block_q - ceil_div(p.seqlen_q, 64) * 64;
    return;
  }
  args.lowest_last = p.seqlen_q % block_q != 0 || tall_tiles < args.q_blocks;
  if (tall_tiles >= args.q_blocks) return;
  args.tall_tiles = tall_tiles;
  args.q_blocks = tall_tiles + ceil_div(p.seqlen_q - tall_tiles * block_q, block_q - 64);
  args.num_tiles = args.q_blocks * p.batch * p.num_heads_q;
}

// Tiles of two query heads that share K and V make a pair, where all heads do, else neighbours.
inline bool pairs_heads(const FwdParams& p) { return p.num_heads_q / p.num_heads_kv % 2 == 0; }

template <class Tile>
FwdArgs make_args(const FwdParams& p, cudaStream_t stream, int tall_tiles) {
  constexpr FwdBoxes kBoxes{Tile::kBlockQ, Tile::kPanelCols, 64, Tile::kBlockKV, 64};
  FwdArgs args{fwd_tile_args(p, kBoxes), tile_counter_index(stream)};
  const bool full = !has_diagonal(p);
  if (Tile::kShiftsRows) shift_rows(args, full, tall_tiles, Tile::kBlockQ);
  // Tiles that differ much in length; those of two warpgroups lose what others gain by larger
  // sections.
  const bool uneven = !full && args.q_blocks >= kManyQBlocks + Tile::kShiftsRows;
  const bool paired = Tile::has(kPair);
  args.section =
      section_that_fills(p, args.q_blocks, uneven && (Tile::kWarpgroups > 2 || paired) ? 2 : 1);
  if (!full && !(uneven && paired)) join_last_sections(args, kJoinedSections);
  if (args.lowest_last) join_last_sections(args, kJoinedLow);
  if (Tile::has(kPair)) {
    args.pair_heads = pairs_heads(p);
    args.num_tiles /= 2;
  }
  args.scale_log2 = p.softmax_scale * kLog2e;
  if (Tile::has(kGeneral)) set_bias_map(args, Tile::kBiasPanels);
  if constexpr (Tile::has(kShareTail)) {
    static LaunchSlots slots(kStreamArrivals, kArrivals);
    args.arrivals = slots.slot_of(stream);
    args.tail = TailPlan::make<Tile>(p);
    args.deal = Deal::make((args.num_tiles - args.tail.from) * args.tail.blocks, args.tail.shares);
  }
  return args;
}

template <class Tile, DType kDType>
void launch_tile(const FwdParams& p, cudaStream_t stream, int tall_tiles = kUnbounded) {
  static std::atomic<uint64_t> smem_allowed{0};
  auto* kernel = fwd_kernel<Tile, kDType>;
  allow_dynamic_smem(kernel, Tile::kSmemBytes, smem_allowed);
  const FwdArgs args = make_args<Tile>(p, stream, tall_tiles);
  if (args.num_tiles == 0) return;
  const int items = Tile::has(kShareTail) ? p.num_sms : args.num_tiles;
  const int blocks = min_of(p.num_sms / Tile::kCluster, items) * Tile::kCluster;
  LaunchShape shape{dim3(blocks), Tile::kThreads, Tile::kSmemBytes, Tile::kCluster};
  shape.after_dependency = !is_capturing(stream);
  launch_kernel(kernel, shape, stream, args);
}

// Keys that a row sees at most; for packed sequences a guess, their lengths are on the device.
inline int64_t keys_of_a_row(const FwdParams& p) {
  int64_t keys = p.seqlen_kv;
  if (p.cu_seqlens_k) keys = min_of(keys, 2 * p.total_kv / max_of(p.batch, 1));
  return min_of(keys, int64_t(p.window_left) + p.window_right + 1);
}

inline bool is_general(const FwdParams& p) {
  return p.softcap != 0.0f || p.alibi_slopes || p.bias || !(p.softmax_scale > 0.0f);
}

// Whole tensors, no chunk, and every row sees a key: those in between do where the first and the
// last one do.
inline bool is_dense(const FwdParams& p) {
  const Mask mask = Mask::make(p, p.seqlen_q, p.seqlen_kv);
  return !p.cu_seqlens_q && !p.cu_seqlens_k && !p.seqused_q && !p.seqused_k &&
         p.attention_chunk == 0 && mask.kv_end(0) > 0 &&
         mask.kv_begin(p.seqlen_q - 1) < p.seqlen_kv;
}

inline bool is_packed(const FwdParams& p) {
  return p.cu_seqlens_q && p.cu_seqlens_k && !p.seqused_q && !p.seqused_k && p.attention_chunk == 0;
}

// Whether a warpgroup has no rows in the last tile of a head.
template <class Tile>
bool leaves_idle(const FwdParams& p) {
  return p.seqlen_q % Tile::kBlockQ != 0 && p.seqlen_q % Tile::kBlockQ <= Tile::kBlockQ - 64;
}

template <class Tile, DType kDType>
void launch_plain(const FwdParams& p, cudaStream_t stream) {
  // With turns the code for idle warpgroups costs more than it gains where all rows are in use.
  if (is_dense(p)) {
    using Dense = typename Tile::template With<kDense>;
    if constexpr (Tile::kLooksAhead) {
      using Ragged = typename Tile::template With<kDense | kRagged>;
      if (leaves_idle<Tile>(p)) return launch_tile<Ragged, kDType>(p, stream);
    }
    return launch_tile<Dense, kDType>(p, stream);
  }
  if (is_packed(p)) {
    return launch_tile<typename Tile::template With<kPacked | kRagged>, kDType>(p, stream);
  }
  launch_tile<Tile, kDType>(p, stream);
}

// Three warpgroups take only a bias of 16 bits that the copy engine reads. Below a diagonal their
// larger tiles pay where a bias is waited for along long rows.
inline bool is_general_long(const FwdParams& p) {
  if (has_diagonal(p) && (!p.bias || keys_of_a_row(p) <= 1024)) return false;
  return !p.bias || (p.bias_dtype != DType::kFloat32 && bias_map_serves(p));
}

// How many tiles of a head are of all of Tall's warpgroups, if Tall is not behind Long; or -1.
template <class Variants>
int tall_tiles(const FwdParams& p) {
  using Tall = typename Variants::Tall;
  if constexpr (Tall::has(kRagged)) {
    if (!is_dense(p) || has_diagonal(p)) return -1;
    const int64_t heads = int64_t(p.batch) * p.num_heads_q;
    const int64_t tiles = ceil_div(p.seqlen_q, Variants::Long::kBlockQ) * heads;
    const Heights tall =
        best_heights<Tall::kWarpgroups>(p.seqlen_q, heads, p.num_sms, Variants::kTallTimes);
    if (tall.time <= time_of_tiles(tiles, 1.0, 0, 1.0, p.num_sms)) return tall.tall;
  }
  return -1;
}

// Below a diagonal or in a window. The longest tiles come first, and one of TallDiagonal's takes
// half as long again, so there must be others that follow. Rows that fill one or two of Diagonal's
// would leave a third of a tall tile empty.
template <class Variants>
bool takes_tall_diagonal(const FwdParams& p) {
  using Tall = typename Variants::TallDiagonal;
  using Others = typename Variants::Diagonal;
  const int64_t tiles = int64_t(ceil_div(p.seqlen_q, Tall::kBlockQ)) * p.batch * p.num_heads_q;
  return Tall::kBlockQ > Others::kBlockQ && is_dense(p) && tiles >= 3 * p.num_sms &&
         (p.seqlen_q > 2 * Others::kBlockQ || leaves_idle<Others>(p));
}

// Pairs of blocks pay where rows see many keys and all SMs have a tile. Below a diagonal neighbours
// see different keys, so that one waits for the other; heads do not.
template <class Variants>
bool takes_pairs(const FwdParams& p) {
  const int q_blocks = ceil_div(p.seqlen_q, Variants::Long::kBlockQ);
  const int from = !has_diagonal(p) ? Variants::kPairKeys
                   : pairs_heads(p) ? Variants::kPairKeysDiagonal / 2
                                    : Variants::kPairKeysDiagonal;
  return is_dense(p) && keys_of_a_row(p) >= from && p.num_sms >= 2 &&
         int64_t(q_blocks) * p.batch * p.num_heads_q >= p.num_sms &&
         (pairs_heads(p) || q_blocks % 2 == 0);
}

// How the last round of Long's tiles is shared in a full call. Not where warpgroups without rows,
// which the tiles of shares do not know, save more; each saves about half of its part of a tile.
template <class Variants>
TailPlan tail_plan(const FwdParams& p) {
  using Tile = typename Variants::Long;
  const bool may_share = Variants::kSharesTail && !is_general(p) && !has_diagonal(p) &&
                         p.seqlen_q > 0 && keys_of_a_row(p) > Variants::kShortKeys && is_dense(p);
  if (!may_share) return {0, 0, 0};
  const TailPlan plan = TailPlan::make<Tile>(p);
  const int64_t heads = int64_t{p.batch} * p.num_heads_q;
  const int64_t warpgroups = ceil_div(p.seqlen_q, Tile::kBlockQ) * Tile::kWarpgroups;
  const int64_t idle = (warpgroups - ceil_div(p.seqlen_q, 64)) * heads;
  const int64_t saved = p.num_sms - (warpgroups / Tile::kWarpgroups * heads - plan.from);
  return idle > 2 * Tile::kWarpgroups * saved ? TailPlan{0, 0, 0} : plan;
}

template <int kHeadDim, int kHeadDimV>
size_t fwd_workspace_bytes(const FwdParams& p) {
  using Variants = FwdVariants<kHeadDim, kHeadDimV>;
  return tail_plan<Variants>(p).template bytes<typename Variants::Long>();
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& p, cudaStream_t stream) {
  using Variants = FwdVariants<kHeadDim, kHeadDimV>;
  if (is_general(p)) {
    if (is_general_long(p)) return launch_tile<typename Variants::GeneralLong, kDType>(p, stream);
    return launch_tile<typename Variants::General, kDType>(p, stream);
  }
  if constexpr (Variants::kPairKeys > 0) {
    if (takes_pairs<Variants>(p)) {
      return launch_tile<typename Variants::Long::template With<kDense | kPair>, kDType>(p, stream);
    }
  }
  if (keys_of_a_row(p) <= Variants::kShortKeys) {
    return launch_plain<typename Variants::Short, kDType>(p, stream);
  }
  if (has_diagonal(p)) {
    if (takes_tall_diagonal<Variants>(p)) {
      return launch_tile<typename Variants::TallDiagonal, kDType>(p, stream);
    }
    return launch_plain<typename Variants::Diagonal, kDType>(p, stream);
  }
  if constexpr (Variants::kSharesTail) {
    using Shared = typename Variants::Long::template With<kDense | kShareTail>;
    if (tail_plan<Variants>(p).shares > 0) return launch_tile<Shared, kDType>(p, stream);
  }
  if (const int tall = tall_tiles<Variants>(p); tall >= 0) {
    return launch_tile<typename Variants::Tall, kDType>(p, stream, tall);
  }
  launch_plain<typename Variants::Long, kDType>(p, stream);
}

}  // namespace flash_cuda::sm90
