// Grid, tensor maps and the chain of kernels of one backward call with wide
// heads.
#pragma once

#include "sm90/bwd_launch.cuh"
#include "sm90/bwd_wide.h"
#include "sm90/bwd_wide_kernel.cuh"

namespace flash_cuda::sm90 {

template <class Tile>
BwdArgs bwd_wide_args(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  constexpr float kLog2E = 1.4426950408889634f;
  BwdArgs args{};
  args.params = params;
  args.work.assign(params.workspace, params, Tile::kBlockQ, Tile::kHeadDim);
  args.scale_log2 = p.softmax_scale * kLog2E;
  if (p.softcap != 0.0f) {
    args.to_score = p.softmax_scale / p.softcap;
    args.scale_log2 = p.softcap * kLog2E;
  } else if (p.alibi_slopes) {
    args.to_score = p.softmax_scale;
    args.scale_log2 = kLog2E;
  }
  args.masked_score = args.scale_log2 < 0.0f ? INFINITY : -INFINITY;
  args.kv_blocks = p.cu_seqlens_k ? static_cast<int>(p.total_kv / Tile::kBlockKV) + p.batch
                                  : ceil_div(p.seqlen_kv, Tile::kBlockKV);
  args.sections_of = p.cu_seqlens_k ? p.num_heads_kv : p.batch * p.num_heads_kv;
  FwdParams clusters = p;
  clusters.num_sms /= 2;
  args.heads_per_section = heads_per_section(clusters, args.sections_of, args.kv_blocks);
  args.num_tasks = args.kv_blocks * args.sections_of;
  return args;
}

inline BwdMaps bwd_wide_maps(BwdWideArgs& args) {
  const BwdParams& params = args.base.params;
  const FwdParams& p = params.fwd;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const auto of_q = [&](const void* base, const Stride& stride, int columns, RowMap& rows) {
    const MapSource source{base,          stride, columns, packed_q ? p.total_q : p.seqlen_q,
                           p.num_heads_q, p.batch};
    rows = row_map(source, packed_q, p.seqused_q);
    return rows_tensor_map(source, rows, 64, 32,
                           p.dtype);  // each block loads half of 64 rows
  };
  const auto of_kv = [&](const void* base, const Stride& stride, int columns, bool clipped,
                         RowMap& rows) {
    const MapSource source{base,           stride, columns, packed_kv ? p.total_kv : p.seqlen_kv,
                           p.num_heads_kv, p.batch};
    rows = row_map(source, packed_kv, clipped);
    return rows_tensor_map(source, rows, 64, 64, p.dtype);
  };
  BwdMaps maps{};
  maps.q = of_q(p.q, p.q_stride, p.head_dim, args.q);
  maps.dout = of_q(params.dout, params.dout_stride, p.head_dim_v, args.dout);
  maps.k = of_kv(p.k, p.k_stride, p.head_dim, p.seqused_k, args.k);
  maps.v = of_kv(p.v, p.v_stride, p.head_dim_v, p.seqused_k, args.v);
  if (params.dk) maps.dk = of_kv(params.dk, params.dk_stride, p.head_dim, false, args.dk);
  if (params.dv) maps.dv = of_kv(params.dv, params.dv_stride, p.head_dim_v, false, args.dv);
  return maps;
}

template <class Tile, DType kDType, bool kGeneral>
void launch_wide_main(const BwdMaps& maps, const BwdWideArgs& args, cudaStream_t stream) {
  constexpr int kSmemBytes = BwdWideSmem<Tile>::kBytes;
  static std::atomic<uint64_t> smem_allowed{0};
  auto* kernel = bwd_wide_kernel<Tile, kDType, kGeneral>;
  allow_dynamic_smem(kernel, kSmemBytes, smem_allowed);
  LaunchShape shape{dim3(static_cast<unsigned>(2 * args.base.num_tasks)), Tile::kThreads,
                    kSmemBytes};
  shape.cluster = 2;
  shape.after_dependency = true;
  launch_kernel(kernel, shape, stream, maps, args);
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd_wide(const BwdParams& params, cudaStream_t stream) {
  using Tile = BwdWideTile<kHeadDim, kHeadDimV>;
  const FwdParams& p = params.fwd;
  BwdWideArgs args{};
  args.base = bwd_wide_args<Tile>(params);
  const BwdMaps maps = bwd_wide_maps(args);
  const dim3 pass_grid(static_cast<unsigned>(args.base.work.row_blocks * p.num_heads_q));
  launch_kernel(bwd_pre_kernel<Tile, kDType>, {pass_grid, kPassThreads, 0}, stream, args.base);
  if (params.dq || params.dk || params.dv) {
    if (p.softcap != 0.0f || p.alibi_slopes) {
      launch_wide_main<Tile, kDType, true>(maps, args, stream);
    } else {
      launch_wide_main<Tile, kDType, false>(maps, args, stream);
    }
  }
  if (params.dq) {
    LaunchShape shape{pass_grid, kPassThreads, 0};
    shape.after_dependency = true;
    launch_kernel(bwd_post_kernel<Tile, kDType>, shape, stream, args.base);
  }
  if (params.dsink) {
    launch_kernel(bwd_sink_kernel<Tile>, {dim3(p.num_heads_q), kPassThreads, 0}, stream, args.base);
  }
}

template <int kHeadDim, int kHeadDimV>
size_t bwd_wide_workspace_bytes(const BwdParams& params) {
  return BwdWorkspace{}.assign(nullptr, params, BwdWideTile<kHeadDim, kHeadDimV>::kBlockQ,
                               kHeadDim);
}

}  // namespace flash_cuda::sm90
