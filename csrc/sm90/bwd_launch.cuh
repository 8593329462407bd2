// Grid, tensor maps and the chain of kernels of one backward call.
#pragma once

#include <cmath>

#include "common/launch.h"
#include "common/log2.h"
#include "common/tma_rows.h"
#include "sm90/bwd.h"
#include "sm90/bwd_kernel.cuh"
#include "sm90/bwd_passes.cuh"
#include "sm90/tile_counter.h"

namespace flash_cuda::sm90 {

inline bool bwd_is_general(const FwdParams& p) {
  return p.softcap != 0.0f || p.alibi_slopes || p.bias;
}

template <class Tile>
int bwd_kv_blocks(const FwdParams& p) {
  return p.cu_seqlens_k ? static_cast<int>(p.total_kv / Tile::kBlockKV) + p.batch
                        : ceil_div(p.seqlen_kv, Tile::kBlockKV);
}

// To how many tasks ("parts") the query heads of a KV head are dealt out. Each has gradients of K
// and V of its own, to be summed: so as few as keep all thread blocks busy. Tasks of unequal length
// (under a mask the longest is about twice the mean) need two a block to even out; and they drift
// apart, so that more than four heads of Q and dO would leave the L2 cache between two of them. In
// deterministic mode more than two would wait for each other, and a single round of long rows would
// end with the thread block whose first turn comes last.
template <class Tile>
int group_splits(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  const int group = p.num_heads_q / p.num_heads_kv;
  const int64_t tasks =
      int64_t(bwd_kv_blocks<Tile>(p)) * p.num_heads_kv * (p.cu_seqlens_k ? 1 : p.batch);
  const bool uneven = p.window_right != kUnbounded || p.cu_seqlens_k;
  const double rounds = uneven ? 2.0 : 1.0;
  const int most_heads = params.deterministic ? 2 : 4;
  double best = 0.0;
  int splits = 1;
  for (int s = 1; s <= group; ++s) {
    if (group % s != 0 || (uneven && group > most_heads * s)) continue;
    const double waves = double(tasks) * s / p.num_sms;
    double busy = uneven ? std::fmin(waves / rounds, 1.0) : waves / std::ceil(waves);
    if (params.deterministic && !uneven && waves <= 1.0 && p.seqlen_kv >= 4096) busy /= 2;
    if (busy > 1.1 * best) {
      best = busy;
      splits = s;
    }
  }
  return splits;
}

// Heads that walk their rows together, the first KV block of all, then the second, so that under a
// causal mask long blocks start first. What the running blocks read and add to has to stay in the
// L2 cache: dense, as many heads as fit the card at once; packed, as many as keep Q and dO in half
// of the cache.
inline int heads_per_section(const FwdParams& p, int heads, int kv_blocks, int splits = 1) {
  if (!p.cu_seqlens_q && !p.cu_seqlens_k) {
    return min_of(heads, max_of(p.num_sms / max_of(kv_blocks, 1), 1));
  }
  constexpr int64_t kL2Budget = 34 << 20;
  const int64_t group_bytes =
      int64_t(p.seqlen_q) * p.head_dim * 4 * (p.num_heads_q / (p.num_heads_kv * splits));
  int section = 1;
  while (section * 2 <= heads && section * 2 * group_bytes <= kL2Budget) section *= 2;
  return section;
}

// Whether all tasks take the same steps.
inline bool bwd_tasks_are_equal(const FwdParams& p) {
  return p.window_left == kUnbounded && p.window_right == kUnbounded && p.attention_chunk == 0 &&
         !p.cu_seqlens_q && !p.cu_seqlens_k && !p.seqused_q && !p.seqused_k;
}

// By how much larger a section is in deterministic mode. The KV blocks of a head follow each other
// at the distance of a turn, and wait less where blocks of other heads come in between: at head dim
// 64 always, else in long rows without a mask, where enough blocks of a head still run at once to
// share what they read.
template <class Tile>
int heads_between(const BwdArgs& args) {
  const FwdParams& p = args.params.fwd;
  if (!args.params.deterministic) return 1;
  if (Tile::kHeadDim == 64) return 2;
  if (!bwd_tasks_are_equal(p)) return 1;
  constexpr bool kNarrow = BwdTask<Tile>::kNarrow;
  constexpr int kBlocksAtOnce = kNarrow ? 16 : 8, kMost = kNarrow ? 4 : 8;
  const int blocks = min_of(p.num_sms / args.heads_per_section, args.kv_blocks);
  return max_of(min_of(blocks / kBlocksAtOnce, kMost), 1);
}

// Under a mask the last two sections are one: it begins with the longest tasks of all its heads, so
// that none of them is the last to be drawn.
template <class Tile>
int bwd_sections(const BwdArgs& args) {
  const FwdParams& p = args.params.fwd;
  const int sections = ceil_div(args.sections_of, args.heads_per_section);
  const bool uneven =
      BwdTask<Tile>::kNarrow && p.window_right != kUnbounded && !p.cu_seqlens_q && !p.cu_seqlens_k;
  return uneven && !args.params.deterministic && sections > 2 ? sections - 1 : sections;
}

// How the tasks of an incomplete last round are shared by all thread blocks, if that saves enough
// Q rows: a piece costs as much as some 300 rows beside its own, and to add it takes a tenth of
// that; conversions keep thread blocks busy that have no task. In deterministic mode all tasks are
// cut at the same rows, else a piece would wait for rows that others reach at their end; and thread
// blocks come to the last round one by one, so that smaller pieces than one for each even it out.
template <class Tile>
BwdShares bwd_shares(const BwdArgs& args, bool converts) {
  const BwdParams& params = args.params;
  const FwdParams& p = params.fwd;
  const int units = p.num_sms, tasks = args.num_tasks % units;
  const bool in_last_section =
      tasks <= args.heads_of_section(args.num_sections - 1) * args.kv_blocks;
  if (!bwd_tasks_are_equal(p) || bwd_is_general(p) || tasks == 0 || !in_last_section) return {};
  int steps = ceil_div(p.seqlen_q, Tile::kBlockQ);
  const int least = static_cast<int>(std::ceil(std::sqrt(0.5 * steps)));
  int length = max_of(ceil_div(tasks * steps, units), least);
  const int saved = (steps - length) * Tile::kBlockQ;
  if (saved < (converts ? 3072 : params.deterministic ? 768 : 512)) return {};
  if (params.deterministic) {
    length = max_of(ceil_div(steps, ceil_div(3 * units, 2 * tasks)), least);
    steps = ceil_div(steps, length) * length;
  }
  BwdShares shares{tasks, steps, length, ceil_div(tasks * steps, length), 0};
  for (int t = 0; t < tasks; ++t) shares.all_pieces += shares.pieces_of(t);
  return shares;
}

// How far ahead of its own tasks a section's sums of dQ are zeroed: when those are drawn, all
// blocks have drawn another task since. 0: by the pre-pass.
inline int sections_ahead(const BwdArgs& args) {
  const FwdParams& p = args.params.fwd;
  if (p.cu_seqlens_q || p.cu_seqlens_k) return 0;
  const int sections = args.num_sections;
  const int ahead = 1 + ceil_div(p.num_sms, args.heads_per_section * args.kv_blocks);
  return ahead < sections ? ahead : 0;
}

// Whether the main kernel makes dQ of its sums. In deterministic mode a conversion that waits would
// hold up turns; long rows gain nothing.
template <class Tile>
bool bwd_converts(const BwdArgs& args) {
  const BwdParams& params = args.params;
  return kConverts<Tile, false> && !bwd_is_general(params.fwd) && !params.deterministic &&
         params.fwd.seqlen_q <= 8192 && args.sections_ahead && params.dq;
}

// Where the main kernel leaves dS for the gradient of a bias.
inline void direct_dbias(BwdArgs& args, cudaStream_t stream) {
  BwdParams& params = args.params;
  const FwdParams& p = params.fwd;
  if (!params.dbias) return;
  if (args.work.dbias) {
    if (!bwd_tiles_all_scores(params)) {
      check_cuda(cudaMemsetAsync(args.work.dbias, 0, args.work.dbias_bytes(p), stream),
                 "cudaMemsetAsync");
    }
    params.dbias = args.work.dbias;
    int64_t& row = params.dbias_row_stride == 0 ? args.dbias_block_stride : params.dbias_row_stride;
    row = p.seqlen_kv;
    params.dbias_col_stride = 1;
    params.dbias_head_stride = row * args.work.dbias_rows;
    params.dbias_batch_stride = params.dbias_head_stride * p.num_heads_q;
  } else if (!bwd_tiles_all_scores(params) || dbias_is_shared(params)) {
    zero_dbias(params, stream);
  }
  params.dbias_shared = dbias_is_shared(params);
}

// And the sums over what shares an element, in deterministic mode.
inline void reduce_dbias(const BwdArgs& args, BwdParams params, cudaStream_t stream) {
  if (!args.work.dbias) return;
  flash_cuda::BwdWorkspace work;
  work.dbias = args.work.dbias;
  params.fwd.seqlen_q = args.work.dbias_rows;
  launch_bwd_dbias(params, work, stream);
}

// After direct_dbias.
inline void choose_bias_access(BwdArgs& args) {
  const BwdParams& g = args.params;
  const auto access = [](const void* base, int64_t row) {
    return !base ? BiasAccess::kNone : row == 0 ? BiasAccess::kKeys : BiasAccess::kTiles;
  };
  args.bias_read = access(g.fwd.bias, g.fwd.bias_row_stride);
  args.bias_write = access(g.dbias, g.dbias_row_stride);
}

// In boxes of 64 rows.
inline void bias_maps(const BwdArgs& args, BwdMaps& maps) {
  const BwdParams& g = args.params;
  const FwdParams& p = g.fwd;
  if (args.bias_read == BiasAccess::kTiles) {
    maps.bias = scores_tensor_map(
        {p.bias, p.bias_batch_stride, p.bias_head_stride, p.bias_row_stride, p.bias_dtype}, p, 64);
  }
  if (args.bias_write == BiasAccess::kTiles) {
    maps.dbias = scores_tensor_map(
        {g.dbias, g.dbias_batch_stride, g.dbias_head_stride, g.dbias_row_stride, DType::kFloat32},
        p, 64);
  }
}

inline bool any_gemm(const BwdArgs& args) {
  const BwdParams& params = args.params;
  return args.num_tasks > 0 && (params.dq || params.dk || params.dv || params.dbias);
}

// Where the main kernel writes dK and dV: the parts, if there are any.
inline void redirect_to_parts(BwdArgs& args) {
  const FwdParams& p = args.params.fwd;
  const int64_t parts = args.parts;
  const auto redirect = [&](void*& out, Stride& stride, void* to, int head_dim) {
    if (!out) return;
    out = to;
    stride = {p.seqlen_kv * parts * head_dim, parts * head_dim, head_dim};
  };
  redirect(args.params.dk, args.params.dk_stride, args.work.dk_parts, p.head_dim);
  redirect(args.params.dv, args.params.dv_stride, args.work.dv_parts, p.head_dim_v);
}

// Whether lengths are on the device, so that a sequence may end before its tensor does.
inline bool bwd_has_lengths(const FwdParams& p) {
  return p.cu_seqlens_q || p.cu_seqlens_k || p.seqused_q || p.seqused_k;
}

// `rows`: how the maps find the rows of a sequence; they stop at its end.
template <class Tile>
BwdMaps bwd_maps(const BwdArgs& args, BwdRowMaps& rows) {
  const BwdParams& g = args.params;
  const FwdParams& p = g.fwd;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const auto map = [&](const MapSource& source, bool packed, bool clipped, int box_rows,
                       RowMap& of) {
    of = row_map(source, packed, clipped);
    return rows_tensor_map(source, of, 64, box_rows, p.dtype);
  };
  const auto of_q = [&](const void* base, const Stride& stride, int columns, RowMap& of) {
    return map({base, stride, columns, packed_q ? p.total_q : p.seqlen_q, p.num_heads_q,
                packed_q ? 1 : p.batch},
               packed_q, p.seqused_q, Tile::kBoxRowsQ, of);
  };
  const auto of_kv = [&](const void* base, const Stride& stride, int columns, int heads,
                         bool clipped, int box_rows, RowMap& of) {
    return map({base, stride, columns, packed_kv ? p.total_kv : p.seqlen_kv, heads,
                packed_kv ? 1 : p.batch},
               packed_kv, clipped, box_rows, of);
  };
  const auto out = [&](void* base, const Stride& stride, int columns, RowMap& of) {
    return of_kv(base, stride, columns, args.parts, false, Tile::kKeys, of);
  };
  BwdMaps maps{};
  maps.q = of_q(p.q, p.q_stride, p.head_dim, rows.q);
  maps.dout = of_q(g.dout, g.dout_stride, p.head_dim_v, rows.dout);
  maps.k =
      of_kv(p.k, p.k_stride, p.head_dim, p.num_heads_kv, p.seqused_k, Tile::kBoxRowsKV, rows.k);
  maps.v =
      of_kv(p.v, p.v_stride, p.head_dim_v, p.num_heads_kv, p.seqused_k, Tile::kBoxRowsKV, rows.v);
  if (g.dk) maps.dk = out(g.dk, g.dk_stride, p.head_dim, rows.dk);
  if (g.dv) maps.dv = out(g.dv, g.dv_stride, p.head_dim_v, rows.dv);
  if (Tile::kBiasStages > 0) bias_maps(args, maps);
  return maps;
}

template <class Tile, DType kDType, bool kGeneral>
void launch_main(const BwdMaps& maps, const BwdArgs& args, const BwdRowMaps& rows,
                 cudaStream_t stream) {
  constexpr int kSmemBytes = BwdSmem<Tile>::kBytes;
  static std::atomic<uint64_t> smem_allowed{0};
  auto* kernel = bwd_kernel<Tile, kDType, kGeneral>;
  allow_dynamic_smem(kernel, kSmemBytes, smem_allowed);
  const int tasks = args.num_tasks + args.shares.count - args.shares.tasks;
  const int blocks = min_of(tasks, args.params.fwd.num_sms);
  LaunchShape shape{dim3(static_cast<unsigned>(blocks)), Tile::kThreads, kSmemBytes};
  shape.after_dependency = true;
  launch_kernel(kernel, shape, stream, maps, args, rows);
}

// The first section whose tasks begin with low keys. Deterministic mode begins with high keys,
// since under a causal mask no task then waits for one that was drawn before it, though the longest
// tasks come last. In the last of several sections they come first all the same: its tasks are
// drawn one by one as those before it end, far enough apart that few wait, and the call ends with
// short ones.
inline int first_down(const BwdArgs& args) {
  const FwdParams& p = args.params.fwd;
  if (!args.params.deterministic) return 0;
  const bool grow = p.window_right != kUnbounded && p.window_left == kUnbounded;  // to low keys
  const int sections = args.num_sections;
  return grow && !p.attention_chunk && sections > 1 ? sections - 1 : sections;
}

// What all kernels of a call are told. `units`: thread blocks, or clusters of them, at a time.
template <class Tile>
BwdArgs bwd_args(const BwdParams& params, int units, int splits = 1) {
  const FwdParams& p = params.fwd;
  BwdArgs args{};
  args.params = params;
  args.params.fwd.num_sms = units;
  args.splits = splits;
  args.parts = p.num_heads_kv * splits;
  args.scale_log2 = p.softmax_scale * kLog2e;
  if (p.softcap != 0.0f) {
    args.to_score = p.softmax_scale / p.softcap;
    args.scale_log2 = p.softcap * kLog2e;
  } else if (p.alibi_slopes || p.bias) {
    args.to_score = p.softmax_scale;
    args.scale_log2 = kLog2e;
  }
  args.masked_score = args.scale_log2 < 0.0f ? INFINITY : -INFINITY;
  args.kv_blocks = bwd_kv_blocks<Tile>(p);
  args.sections_of = (p.cu_seqlens_k ? 1 : p.batch) * args.parts;
  args.heads_per_section =
      heads_per_section(args.params.fwd, args.sections_of, args.kv_blocks, splits);
  args.heads_per_section =
      min_of(heads_between<Tile>(args) * args.heads_per_section, args.sections_of);
  args.batch_inner = Tile::kBiasStages > 0 && p.bias && p.bias_batch_stride == 0;
  args.num_tasks = args.kv_blocks * args.sections_of;
  args.num_sections = bwd_sections<Tile>(args);
  args.joined_heads = max_of(args.sections_of - args.num_sections * args.heads_per_section, 0);
  args.last_heads = args.heads_per_section + args.joined_heads;
  args.first_down = first_down(args);
  args.sections_ahead = any_gemm(args) ? sections_ahead(args) : 0;
  args.q_blocks = ceil_div(p.seqlen_q, Tile::kBlockQ);
  // A task that is drawn and not begun keeps others waiting.
  args.draw_at = params.deterministic ? 2 : Tile::kHeadDim > 128 ? 8 : 4;
  bool converts = false;
  if constexpr (BwdTask<Tile>::kNarrow) {
    converts = bwd_converts<Tile>(args);
    if (converts) {
      const int items_of_head = p.num_heads_q / args.parts * args.q_blocks;
      const auto conversions = [&](int heads, int blocks) {
        return ceil_div(heads * items_of_head, blocks);
      };
      args.conversions = conversions(args.heads_per_section, kConvertBlocks);
      args.last_conversions =
          conversions(args.heads_of_section(args.num_sections - 1), kLastConvertBlocks);
    }
  }
  if constexpr (kShares<Tile, false>) args.shares = bwd_shares<Tile>(args, converts);
  args.work.assign(params.workspace, params, Tile::kBlockQ, Tile::kHeadDim, splits,
                   args.shares.tasks, args.shares.slots());
  args.num_draws = args.num_tasks + args.shares.count - args.shares.tasks +
                   (args.num_sections - 1) * args.conversions + args.last_conversions;
  return args;
}

// The kernels of a call around `launch_main`.
template <class Tile, DType kDType, class Main>
void launch_passes(BwdArgs& args, const BwdParams& params, cudaStream_t stream,
                   const Main& launch_main) {
  const int heads = params.fwd.num_heads_q;
  const dim3 pass_grid(static_cast<unsigned>(args.work.row_blocks * heads));
  direct_dbias(args, stream);
  if (Tile::kBiasStages > 0) choose_bias_access(args);
  LaunchShape pre{pass_grid, kPassThreads, 0};
  pre.after_dependency = !is_capturing(stream);
  launch_kernel(bwd_pre_kernel<Tile, kDType>, pre, stream, args);
  if (any_gemm(args)) launch_main();
  if (params.dq && !args.conversions) {
    LaunchShape shape{pass_grid, kPassThreads, 0};
    shape.after_dependency = true;
    launch_kernel(bwd_post_kernel<Tile, kDType>, shape, stream, args);
  }
  if (params.dsink) {
    launch_kernel(bwd_sink_kernel<Tile>, {dim3(heads), kPassThreads, 0}, stream, args);
  }
  reduce_dbias(args, params, stream);
}

template <class Tile, DType kDType>
void launch_bwd_tile(const BwdParams& params, cudaStream_t stream) {
  const int num_sms = params.fwd.num_sms;
  BwdArgs args = bwd_args<Tile>(params, num_sms, group_splits<Tile>(params));
  launch_passes<Tile, kDType>(args, params, stream, [&] {
    BwdArgs main_args = args;
    main_args.counter = tile_counter_index(stream);
    if (args.splits > 1) redirect_to_parts(main_args);
    BwdRowMaps rows;
    const BwdMaps maps = bwd_maps<Tile>(main_args, rows);
    if (Tile::kBiasStages > 0 ? params.fwd.softcap != 0.0f : bwd_is_general(params.fwd)) {
      launch_main<Tile, kDType, true>(maps, main_args, rows, stream);
    } else {
      launch_main<Tile, kDType, false>(maps, main_args, rows, stream);
    }
    if (args.splits > 1) {
      LaunchShape shape{dim3(static_cast<unsigned>(4 * num_sms)), kPassThreads, 0};
      shape.after_dependency = true;
      launch_kernel(bwd_parts_kernel<kDType>, shape, stream, args);
    }
  });
}

// Runs `call` with the tile that serves the call. Head dim 96 has none with a bias and refuses.
template <int kHeadDim, class Call>
auto with_bwd_tile(const BwdParams& params, const Call& call) {
  if constexpr (kHeadDim != 96) {
    if (bwd_has_bias_tile(params)) return call(BwdBiasTile<kHeadDim>{});
  }
  if constexpr (kHeadDim == 128) {
    if (params.deterministic) return call(BwdOrderedTile<kHeadDim>{});
  }
  return call(BwdTile<kHeadDim>{});
}

template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, cudaStream_t stream) {
  with_bwd_tile<kHeadDim>(
      params, [&](auto tile) { launch_bwd_tile<decltype(tile), kDType>(params, stream); });
}

template <class Tile>
size_t bwd_workspace_bytes_of(const BwdParams& params, int units, int splits = 1) {
  BwdParams sized = params;
  sized.workspace = nullptr;
  const BwdShares shares = bwd_args<Tile>(sized, units, splits).shares;
  return BwdWorkspace{}.assign(nullptr, params, Tile::kBlockQ, Tile::kHeadDim, splits, shares.tasks,
                               shares.slots());
}
template <int kHeadDim>
size_t bwd_workspace_bytes(const BwdParams& params) {
  return with_bwd_tile<kHeadDim>(params, [&](auto tile) {
    using Tile = decltype(tile);
    return bwd_workspace_bytes_of<Tile>(params, params.fwd.num_sms, group_splits<Tile>(params));
  });
}

}  // namespace flash_cuda::sm90
