// Which tile serves a call: arithmetic on its shape, with the figures of fwd_variants.h.
#pragma once

#include "common/mask.h"
#include "common/params.h"
#include "sm90/fwd_heights.h"
#include "sm90/fwd_tail.h"
#include "sm90/fwd_variants.h"

namespace flash_cuda::sm90 {

inline bool has_diagonal(const FwdParams& p) {
  return p.window_right < kUnbounded || p.window_left < kUnbounded || p.attention_chunk > 0;
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

// Tiles of two query heads that share K and V make a pair, where all heads do, else neighbours.
inline bool pairs_heads(const FwdParams& p) { return p.num_heads_q / p.num_heads_kv % 2 == 0; }

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

// Three warpgroups take only a bias of 16 bits that the copy engine reads. Below a diagonal their
// larger tiles pay where a bias is waited for along long rows.
inline bool is_general_long(const FwdParams& p) {
  if (has_diagonal(p) && (!p.bias || keys_of_a_row(p) <= 1024)) return false;
  return !p.bias || (p.bias_dtype != DType::kFloat32 && bias_map_serves(p));
}

// Below a diagonal or in a window. The longest tiles come first, and one of TallDiagonal's takes
// half as long again, so there must be others that follow. Rows that fill one or two of Diagonal's
// would leave a third of a tall tile empty.
template <class Tall, class Others>
bool takes_tall_diagonal(const FwdParams& p) {
  const int64_t tiles = int64_t(ceil_div(p.seqlen_q, Tall::kBlockQ)) * p.batch * p.num_heads_q;
  return is_dense(p) && tiles >= 3 * p.num_sms &&
         (p.seqlen_q > 2 * Others::kBlockQ || leaves_idle<Others>(p));
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

// Pairs of blocks pay where rows see many keys and all SMs have a tile. Below a diagonal neighbours
// see different keys, so that one waits for the other; heads do not.
template <class Variants>
bool may_pair(const FwdParams& p, int q_blocks) {
  constexpr PairKeys kFrom = Variants::kPairKeys;
  const int from = !has_diagonal(p) ? kFrom.full : pairs_heads(p) ? kFrom.heads : kFrom.neighbours;
  return is_dense(p) && keys_of_a_row(p) >= from && p.num_sms >= 2 &&
         int64_t(q_blocks) * p.batch * p.num_heads_q >= p.num_sms;
}
template <class Variants, class Tile>
bool takes_pairs(const FwdParams& p) {
  const int q_blocks = ceil_div(p.seqlen_q, Tile::kBlockQ);
  return may_pair<Variants>(p, q_blocks) && (pairs_heads(p) || q_blocks % 2 == 0);
}

// How a full call is cut into tiles of Tall's, alone or in pairs; neither where Long's end sooner.
struct TallChoice {
  bool serves, pairs;
  int tall_tiles;
};
template <class Variants>
TallChoice choose_tall(const FwdParams& p) {
  using Tall = typename Variants::Tall;
  const int64_t heads = int64_t(p.batch) * p.num_heads_q;
  const int64_t tiles = ceil_div(p.seqlen_q, Variants::Long::kBlockQ) * heads;
  const double time = time_of_tiles(tiles, 1.0, 0, 1.0, p.num_sms);
  const auto heights = [&](const TileTimes& times, bool by_two) {
    return best_heights<Tall::kWarpgroups>(p.seqlen_q, heads, p.num_sms, times, by_two);
  };
  if (may_pair<Variants>(p, ceil_div(p.seqlen_q, Tall::kBlockQ))) {
    constexpr TileTimes kTimes = Variants::kPairTimes;
    const Heights pairs = heights(kTimes, !pairs_heads(p));
    // Where an even number of tiles for each head takes longer, pairs gain less than that.
    if (pairs.time <= min_of(time, 1.005 * heights(kTimes, false).time)) {
      return {true, true, pairs.tall};
    }
  }
  const Heights alone = heights(Variants::kTallTimes, false);
  return {alone.time <= time, false, alone.tall};
}

template <class T>
struct TileType {
  using Type = T;
};

// Calls `f(TileType<Tile>{}, tall_tiles)`: see FwdArgs::tall_tiles.
template <class Tile, class F>
auto with_plain_tile(const FwdParams& p, const F& f) {
  using Dense = typename Tile::template With<kDense>;
  using Packed = typename Tile::template With<kPacked | kRagged>;
  if (is_packed(p)) return f(TileType<Packed>{}, kUnbounded);
  if (!is_dense(p)) return f(TileType<Tile>{}, kUnbounded);
  // With turns the code for idle warpgroups costs more than it gains where all rows are in use.
  if constexpr (Tile::kLooksAhead) {
    using Ragged = typename Tile::template With<kDense | kRagged>;
    if (leaves_idle<Tile>(p)) return f(TileType<Ragged>{}, kUnbounded);
  }
  return f(TileType<Dense>{}, kUnbounded);
}
template <class Variants, class F>
auto with_diagonal_tile(const FwdParams& p, const F& f) {
  using Others = typename Variants::Diagonal;
  if constexpr (Variants::kHasTall) {
    using Tall = typename Variants::TallDiagonal;
    using Pair = typename Tall::template With<kPair>;
    if (takes_tall_diagonal<Tall, Others>(p)) {
      if (takes_pairs<Variants, Tall>(p)) return f(TileType<Pair>{}, kUnbounded);
      return f(TileType<Tall>{}, kUnbounded);
    }
  } else if constexpr (Variants::kPairKeys.any()) {
    using Pair = typename Others::template With<kDense | kPair>;
    if (takes_pairs<Variants, Others>(p)) return f(TileType<Pair>{}, kUnbounded);
  }
  return with_plain_tile<Others>(p, f);
}
template <class Variants, class F>
auto with_full_tile(const FwdParams& p, const F& f) {
  using Long = typename Variants::Long;
  if constexpr (Variants::kSharesTail) {
    using Shared = typename Long::template With<kDense | kShareTail>;
    if (tail_plan<Variants>(p).shares > 0) return f(TileType<Shared>{}, kUnbounded);
  }
  if constexpr (Variants::kHasTall) {
    using Tall = typename Variants::Tall;
    const TallChoice choice = is_dense(p) ? choose_tall<Variants>(p) : TallChoice{};
    if (choice.pairs) {
      return f(TileType<typename Tall::template With<kPair>>{}, choice.tall_tiles);
    }
    if (choice.serves) return f(TileType<Tall>{}, choice.tall_tiles);
  } else if constexpr (Variants::kPairKeys.any()) {
    using Pair = typename Long::template With<kDense | kPair>;
    if (takes_pairs<Variants, Long>(p)) return f(TileType<Pair>{}, kUnbounded);
  }
  return with_plain_tile<Long>(p, f);
}
template <class Variants, class F>
auto with_tile(const FwdParams& p, const F& f) {
  if (is_general(p)) {
    if (is_general_long(p)) return f(TileType<typename Variants::GeneralLong>{}, kUnbounded);
    return f(TileType<typename Variants::General>{}, kUnbounded);
  }
  if (keys_of_a_row(p) <= Variants::kShortKeys) {
    return with_plain_tile<typename Variants::Short>(p, f);
  }
  if (has_diagonal(p)) return with_diagonal_tile<Variants>(p, f);
  return with_full_tile<Variants>(p, f);
}

}  // namespace flash_cuda::sm90
