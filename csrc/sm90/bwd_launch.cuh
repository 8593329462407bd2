// Grid, tensor maps and the chain of kernels of one backward call.
#pragma once

#include "common/launch.h"
#include "common/tensor_map.h"
#include "sm90/bwd.h"
#include "sm90/bwd_kernel.cuh"
#include "sm90/bwd_passes.cuh"

namespace flash_cuda::sm90 {

// Boxes of 64 columns and `rows` rows of (head_dim, rows, heads, batch).
inline CUtensorMap bwd_map(const void* base, Stride stride, int64_t head_dim, int64_t rows,
                           int64_t heads, int64_t batch, int box_rows, DType dtype) {
  return make_tensor_map({base,
                          {head_dim, rows, heads, batch},
                          {stride.row, stride.head, stride.batch},
                          {64, box_rows, 1, 1},
                          128},
                         dtype);
}

// Heads that walk their rows together, the first KV block of all, then the second, so that under a
// causal mask long blocks start first. What the running blocks read and add to has to stay in the
// L2 cache: dense, as many heads as fit the card at once; packed, as many as keep Q and dO in half
// of the cache.
inline int heads_per_section(const FwdParams& p, int heads, int kv_blocks) {
  if (!p.cu_seqlens_q && !p.cu_seqlens_k) {
    return min_of(heads, max_of(p.num_sms / max_of(kv_blocks, 1), 1));
  }
  constexpr int64_t kL2Budget = 34 << 20;
  const int64_t group_bytes =
      int64_t(p.seqlen_q) * p.head_dim * 4 * (p.num_heads_q / p.num_heads_kv);
  int section = 1;
  while (section * 2 <= heads && section * 2 * group_bytes <= kL2Budget) section *= 2;
  return section;
}

// How far ahead of its own tasks a section's sums of dQ are zeroed: when those are drawn, all
// blocks have drawn another task since. 0: by the pre-pass.
inline int sections_ahead(const BwdArgs& args) {
  const FwdParams& p = args.params.fwd;
  if (p.cu_seqlens_q || p.cu_seqlens_k) return 0;
  const int sections = ceil_div(args.sections_of, args.heads_per_section);
  const int ahead = 1 + ceil_div(p.num_sms, args.heads_per_section * args.kv_blocks);
  return ahead < sections ? ahead : 0;
}

// Where the main kernel leaves dS for the gradient of a bias.
inline void direct_dbias(BwdArgs& args, cudaStream_t stream) {
  BwdParams& params = args.params;
  const FwdParams& p = params.fwd;
  if (!params.dbias) return;
  if (args.work.dbias) {
    check_cuda(cudaMemsetAsync(args.work.dbias, 0, args.work.dbias_bytes(p), stream),
               "cudaMemsetAsync");
    params.dbias = args.work.dbias;
    int64_t& row = params.dbias_row_stride == 0 ? args.dbias_block_stride : params.dbias_row_stride;
    row = p.seqlen_kv;
    params.dbias_col_stride = 1;
    params.dbias_head_stride = row * args.work.dbias_rows;
    params.dbias_batch_stride = params.dbias_head_stride * p.num_heads_q;
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

inline bool any_gemm(const BwdArgs& args) {
  const BwdParams& params = args.params;
  return args.num_tasks > 0 && (params.dq || params.dk || params.dv || params.dbias);
}

inline bool bwd_is_general(const FwdParams& p) {
  return p.softcap != 0.0f || p.alibi_slopes || p.bias;
}

template <class Tile>
BwdMaps bwd_maps(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q, batch_q = packed_q ? 1 : p.batch;
  const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv, batch_kv = packed_kv ? 1 : p.batch;
  const auto of_q = [&](const void* base, const Stride& stride, int columns) {
    return bwd_map(base, stride, columns, rows_q, p.num_heads_q, batch_q, Tile::kBlockQ, p.dtype);
  };
  const auto of_kv = [&](const void* base, const Stride& stride, int columns, int box_rows) {
    return bwd_map(base, stride, columns, rows_kv, p.num_heads_kv, batch_kv, box_rows, p.dtype);
  };
  constexpr int kOutRows = Tile::kBlockKV / Tile::kConsumerWarpgroups;
  BwdMaps maps{};
  maps.q = of_q(p.q, p.q_stride, p.head_dim);
  maps.dout = of_q(params.dout, params.dout_stride, p.head_dim_v);
  maps.k = of_kv(p.k, p.k_stride, p.head_dim, Tile::kBlockKV);
  maps.v = of_kv(p.v, p.v_stride, p.head_dim_v, Tile::kBlockKV);
  if (params.dk) maps.dk = of_kv(params.dk, params.dk_stride, p.head_dim, kOutRows);
  if (params.dv) maps.dv = of_kv(params.dv, params.dv_stride, p.head_dim_v, kOutRows);
  return maps;
}

template <class Tile, DType kDType, bool kGeneral>
void launch_main(const BwdMaps& maps, const BwdArgs& args, cudaStream_t stream) {
  constexpr int kSmemBytes = BwdSmem<Tile>::kBytes;
  static std::atomic<uint64_t> smem_allowed{0};
  auto* kernel = bwd_kernel<Tile, kDType, kGeneral>;
  allow_dynamic_smem(kernel, kSmemBytes, smem_allowed);
  const int blocks = min_of(args.num_tasks, args.params.fwd.num_sms);
  LaunchShape shape{dim3(static_cast<unsigned>(blocks)), Tile::kThreads, kSmemBytes};
  shape.after_dependency = true;
  launch_kernel(kernel, shape, stream, maps, args);
}

// What all kernels of a call are told. `units`: thread blocks, or clusters of them, at a time.
template <class Tile>
BwdArgs bwd_args(const BwdParams& params, int units) {
  const FwdParams& p = params.fwd;
  BwdArgs args{};
  args.params = params;
  args.params.fwd.num_sms = units;
  args.work.assign(params.workspace, params, Tile::kBlockQ, Tile::kHeadDim);
  constexpr float kLog2E = 1.4426950408889634f;
  args.scale_log2 = p.softmax_scale * kLog2E;
  if (p.softcap != 0.0f) {
    args.to_score = p.softmax_scale / p.softcap;
    args.scale_log2 = p.softcap * kLog2E;
  } else if (p.alibi_slopes || p.bias) {
    args.to_score = p.softmax_scale;
    args.scale_log2 = kLog2E;
  }
  args.masked_score = args.scale_log2 < 0.0f ? INFINITY : -INFINITY;
  args.kv_blocks = p.cu_seqlens_k ? static_cast<int>(p.total_kv / Tile::kBlockKV) + p.batch
                                  : ceil_div(p.seqlen_kv, Tile::kBlockKV);
  args.sections_of = p.cu_seqlens_k ? p.num_heads_kv : p.batch * p.num_heads_kv;
  args.heads_per_section = heads_per_section(args.params.fwd, args.sections_of, args.kv_blocks);
  // Deterministic mode goes from high keys to low: the KV blocks of a head one after the other, so
  // that a block does not wait long for the one on its diagonal.
  if (params.deterministic && p.window_right != kUnbounded) args.heads_per_section = 1;
  args.num_tasks = args.kv_blocks * args.sections_of;
  args.q_blocks = ceil_div(p.seqlen_q, Tile::kBlockQ);
  args.sections_ahead = any_gemm(args) ? sections_ahead(args) : 0;
  return args;
}

// The kernels of a call around `launch_main`.
template <class Tile, DType kDType, class Main>
void launch_passes(BwdArgs& args, const BwdParams& params, cudaStream_t stream,
                   const Main& launch_main) {
  const int heads = params.fwd.num_heads_q;
  const dim3 pass_grid(static_cast<unsigned>(args.work.row_blocks * heads));
  direct_dbias(args, stream);
  launch_kernel(bwd_pre_kernel<Tile, kDType>, {pass_grid, kPassThreads, 0}, stream, args);
  if (any_gemm(args)) launch_main();
  if (params.dq) {
    LaunchShape shape{pass_grid, kPassThreads, 0};
    shape.after_dependency = true;
    launch_kernel(bwd_post_kernel<Tile, kDType>, shape, stream, args);
  }
  if (params.dsink) {
    launch_kernel(bwd_sink_kernel<Tile>, {dim3(heads), kPassThreads, 0}, stream, args);
  }
  reduce_dbias(args, params, stream);
}

template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, cudaStream_t stream) {
  using Tile = BwdTile<kHeadDim>;
  BwdArgs args = bwd_args<Tile>(params, params.fwd.num_sms);
  const BwdMaps maps = bwd_maps<Tile>(params);
  launch_passes<Tile, kDType>(args, params, stream, [&] {
    if (bwd_is_general(params.fwd)) {
      launch_main<Tile, kDType, true>(maps, args, stream);
    } else {
      launch_main<Tile, kDType, false>(maps, args, stream);
    }
  });
}

template <int kHeadDim>
size_t bwd_workspace_bytes(const BwdParams& params) {
  return BwdWorkspace{}.assign(nullptr, params, BwdTile<kHeadDim>::kBlockQ, kHeadDim);
}

}  // namespace flash_cuda::sm90
