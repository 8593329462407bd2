// Grid, tensor maps and the chain of kernels of one backward call with wide heads.
#pragma once

#include "sm90/bwd_launch.cuh"
#include "sm90/bwd_wide.h"
#include "sm90/bwd_wide_kernel.cuh"

namespace flash_cuda::sm90 {

inline BwdMaps bwd_wide_maps(BwdWideArgs& args) {
  const BwdParams& params = args.base.params;
  const FwdParams& p = params.fwd;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const auto of_q = [&](const void* base, const Stride& stride, int columns, RowMap& rows) {
    const MapSource source{base,          stride, columns, packed_q ? p.total_q : p.seqlen_q,
                           p.num_heads_q, p.batch};
    rows = row_map(source, packed_q, p.seqused_q);
    return rows_tensor_map(source, rows, 64, 32, p.dtype);  // each block loads half of 64 rows
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

template <class Tile, DType kDType, bool kGeneral, bool kClipped>
void launch_wide_main(const BwdMaps& maps, const BwdWideArgs& args, cudaStream_t stream) {
  constexpr int kSmemBytes = BwdWideSmem<Tile>::kBytes;
  static std::atomic<uint64_t> smem_allowed{0};
  auto* kernel = bwd_wide_kernel<Tile, kDType, kGeneral, kClipped>;
  allow_dynamic_smem(kernel, kSmemBytes, smem_allowed);
  const int clusters = min_of(args.base.num_tasks, args.base.params.fwd.num_sms);
  LaunchShape shape{dim3(static_cast<unsigned>(2 * clusters)), Tile::kThreads, kSmemBytes};
  shape.cluster = 2;
  shape.after_dependency = true;
  launch_kernel(kernel, shape, stream, maps, args);
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd_wide(const BwdParams& params, cudaStream_t stream) {
  using Tile = BwdWideTile<kHeadDim, kHeadDimV>;
  const FwdParams& p = params.fwd;
  const bool clipped = p.cu_seqlens_q || p.cu_seqlens_k || p.seqused_q || p.seqused_k;
  BwdWideArgs args{};
  args.base = bwd_args<Tile>(params, max_of(p.num_sms / 2, 1));
  const BwdMaps maps = bwd_wide_maps(args);
  launch_passes<Tile, kDType>(args.base, params, stream, [&] {
    if (bwd_is_general(p)) {
      launch_wide_main<Tile, kDType, true, true>(maps, args, stream);
    } else if (clipped) {
      launch_wide_main<Tile, kDType, false, true>(maps, args, stream);
    } else {
      launch_wide_main<Tile, kDType, false, false>(maps, args, stream);
    }
  });
}

template <int kHeadDim, int kHeadDimV>
size_t bwd_wide_workspace_bytes(const BwdParams& params) {
  return BwdWorkspace{}.assign(nullptr, params, BwdWideTile<kHeadDim, kHeadDimV>::kBlockQ,
                               kHeadDim);
}

}  // namespace flash_cuda::sm90
