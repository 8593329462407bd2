// Launch of the forward kernel, with the tile that fwd_variants.h has for the call.
#pragma once

#include "common/launch.h"
#include "common/launch_slots.h"
#include "common/log2.h"
#include "sm90/fwd.h"
#include "sm90/fwd_choice.h"
#include "sm90/fwd_store.cuh"
#include "sm90/tile_counter.h"

namespace flash_cuda::sm90 {

// Below a diagonal a launch is to end with short tiles, so that all SMs end at the same time. So
// the tiles that see at most a quarter of the keys are held back until those of all heads are drawn
// (they are few, and read few keys again), and the last sections are walked as one; more of them
// where none are held back. With many tiles a head sections are larger.
constexpr int kHeldShare = 4, kJoinedHeld = 2, kJoined = 3, kManyQBlocks = 16;
// The last sections of a full call where a head ends with lower tiles.
constexpr int kJoinedLow = 2;

// (batch, head) pairs that are walked together, whole groups: their tiles fill the device so often.
inline int section_that_fills(const FwdParams& p, int q_blocks, int waves) {
  const int group = p.num_heads_q / p.num_heads_kv;
  const int pairs = waves * p.num_sms / max_of(q_blocks, 1);
  return max_of(ceil_div(pairs, group), 1) * group;
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

// Q blocks of each head that are held back; an even number in pairs. Of small tiles it takes more
// until that pays.
template <class Tile>
int held_back(const FwdParams& p, int q_blocks) {
  constexpr int kLeast = Tile::kWarpgroups > 2 ? 4 : 10;
  if (q_blocks < kLeast || p.attention_chunk > 0) return 0;
  const int keys_of_first = Mask::make(p, p.seqlen_q, p.seqlen_kv).kv_end(0);
  const int rows = static_cast<int>(keys_of_a_row(p) / kHeldShare) - keys_of_first;
  const int blocks = min_of(ceil_div(max_of(rows, 0), Tile::kBlockQ), q_blocks / kHeldShare);
  return ceil_div(blocks, Tile::kCluster) * Tile::kCluster;
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

template <class Tile>
FwdArgs make_args(const FwdParams& p, cudaStream_t stream, int tall_tiles) {
  constexpr FwdBoxes kBoxes{Tile::kBlockQ, Tile::kPanelCols, 64, Tile::kBlockKV, 64};
  FwdArgs args{fwd_tile_args(p, kBoxes), tile_counter_index(stream)};
  const bool full = !has_diagonal(p);
  if (Tile::kShiftsRows) shift_rows(args, full, tall_tiles, Tile::kBlockQ);
  const bool uneven = !full && args.q_blocks >= kManyQBlocks + Tile::kShiftsRows;
  args.section = section_that_fills(p, args.q_blocks, uneven && Tile::kWarpgroups > 2 ? 2 : 1);
  if (!full) {
    args.held_back = held_back<Tile>(p, args.q_blocks);
    join_last_sections(args, args.held_back ? kJoinedHeld : kJoined);
  }
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

template <int kHeadDim, int kHeadDimV>
size_t fwd_workspace_bytes(const FwdParams& p) {
  using Variants = FwdVariants<kHeadDim, kHeadDimV>;
  return tail_plan<Variants>(p).template bytes<typename Variants::Long>();
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& p, cudaStream_t stream) {
  with_tile<FwdVariants<kHeadDim, kHeadDimV>>(p, [&](auto tile, int tall_tiles) {
    launch_tile<typename decltype(tile)::Type, kDType>(p, stream, tall_tiles);
  });
}

}  // namespace flash_cuda::sm90
