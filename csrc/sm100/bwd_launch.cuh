// Tensor maps, the chain of kernels of a backward call, and which tile serves it.
#pragma once

#include "common/bwd_postprocess.cuh"
#include "common/launch.h"
#include "sm100/bwd.h"
#include "sm100/bwd_kernel.cuh"
#include "sm100/bwd_pair_kernel.cuh"
#include "sm100/bwd_place.h"

namespace flash_cuda::sm100 {

// Stages of Q and of dO.
template <int kHeadDim, int kHeadDimV>
struct BwdStages;
template <>
struct BwdStages<64, 64> {
  static constexpr int kQ = 2, kDout = 2;
};
template <>
struct BwdStages<96, 96> {
  static constexpr int kQ = 2, kDout = 1;
};
template <>
struct BwdStages<128, 128> {
  static constexpr int kQ = 2, kDout = 1;
};
template <>
struct BwdStages<192, 128> {
  static constexpr int kQ = 1, kDout = 1;
};

constexpr int kTurnsDq = 8;  // parts of a dQ tile, one of each warp of one or two thread blocks

template <int kHeadDim>
BwdWorkspace bwd_workspace(const BwdParams& params, char* base, size_t* bytes) {
  BwdWorkspace ws = BwdWorkspace::shape(params, 128, kHeadDim, kTurnsDq);
  *bytes = ws.place(params, base);
  return ws;
}
template <int kHeadDim>
size_t bwd_workspace_bytes(const BwdParams& params) {
  size_t bytes;
  bwd_workspace<kHeadDim>(params, nullptr, &bytes);
  return bytes;
}

// KV heads whose Q and dO stay in the L2 cache together, with those of their group.
inline int kv_heads_section(const FwdParams& p) {
  const double group = p.num_heads_q / max_of(p.num_heads_kv, 1);
  const double bytes = 2.0 * p.seqlen_q * (p.head_dim + p.head_dim_v) * group;
  const int heads = max_of(p.num_heads_kv * p.batch, 1);
  return static_cast<int>(
      min_of(max_of(1.0, 32e6 / max_of(bytes, 1.0)), static_cast<double>(heads)));
}

template <class Tile>
BwdArgs make_bwd_args(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  BwdArgs args{};
  args.params = params;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv;
  const auto map = [&](CUtensorMap* tensor_map, RowMap* rows, const MapSource& t, int box_rows,
                       bool packed, bool clipped) {
    if (!t.base) return;
    *rows = row_map(t, packed, clipped);
    *tensor_map = rows_tensor_map(t, *rows, Tile::kPanelCols, box_rows, p.dtype);
  };
  const auto map_q = [&](CUtensorMap* tensor_map, RowMap* rows, const void* base,
                         const Stride& stride, int columns) {
    map(tensor_map, rows, {base, stride, columns, rows_q, p.num_heads_q, p.batch}, Tile::kBoxRows,
        packed_q, p.seqused_q);
  };
  const auto map_kv = [&](CUtensorMap* tensor_map, RowMap* rows, const void* base,
                          const Stride& stride, int columns, int box_rows, bool clipped) {
    map(tensor_map, rows, {base, stride, columns, rows_kv, p.num_heads_kv, p.batch}, box_rows,
        packed_kv, clipped);
  };
  constexpr int kIn = Tile::kBoxRows, kOut = Tile::kBlockKV;
  map_q(&args.q_map, &args.q_rows, p.q, p.q_stride, p.head_dim);
  map_q(&args.dout_map, &args.dout_rows, params.dout, params.dout_stride, p.head_dim_v);
  map_kv(&args.k_map, &args.k_rows, p.k, p.k_stride, p.head_dim, kIn, p.seqused_k);
  map_kv(&args.v_map, &args.v_rows, p.v, p.v_stride, p.head_dim_v, kIn, p.seqused_k);
  map_kv(&args.dk_map, &args.dk_rows, params.dk, params.dk_stride, p.head_dim, kOut, false);
  map_kv(&args.dv_map, &args.dv_rows, params.dv, params.dv_stride, p.head_dim_v, kOut, false);
  size_t bytes;
  args.workspace =
      bwd_workspace<Tile::kHeadDim>(params, static_cast<char*>(params.workspace), &bytes);
  constexpr int kKeys = (Tile::kPair ? 2 : 1) * Tile::kBlockKV;
  // Ascending, as the deterministic order of dq wants it (and longest first under a causal mask).
  args.schedule = {ceil_div(p.seqlen_kv, kKeys), p.num_heads_kv, p.batch, kv_heads_section(p),
                   false};
  return args;
}

template <class Tile, DType kDType>
constexpr auto* bwd_kernel_of() {
  if constexpr (Tile::kPair) {
    return bwd_pair_kernel<Tile, kDType>;
  } else {
    return bwd_kernel<Tile, kDType>;
  }
}

template <class Tile, DType kDType>
void launch_bwd_tile(const BwdParams& params, cudaStream_t stream) {
  static std::atomic<uint64_t> smem_allowed{0};
  const FwdParams& p = params.fwd;
  BwdArgs args = make_bwd_args<Tile>(params);
  place_dbias(args.params, args.workspace, stream);
  const BwdWorkspace& ws = args.workspace;
  launch_bwd_preprocess(params, ws, stream);
  if (params.wanted & kWantDsink) launch_bwd_sink(params, ws, stream);
  constexpr int kCluster = Tile::kPair ? 2 : 1;
  const int64_t tasks =
      p.cu_seqlens_k
          ? packed_blocks(p.total_kv, p.batch, kCluster * Tile::kBlockKV) * p.num_heads_kv
          : args.schedule.size();
  if (tasks > 0 && (params.wanted & ~kWantDsink)) {
    auto* kernel = bwd_kernel_of<Tile, kDType>();
    allow_dynamic_smem(kernel, Tile::kSmemBytes, smem_allowed);
    launch_kernel(
        kernel,
        {dim3(static_cast<unsigned>(tasks * kCluster)), Tile::kThreads, Tile::kSmemBytes, kCluster},
        stream, args);
  }
  const int64_t tiles = ws.tiles * p.num_heads_q;
  if (params.dq && tiles > 0) {
    launch_kernel(bwd_postprocess_kernel<kDType>,
                  {dim3(static_cast<unsigned>(tiles)), kPostprocessThreads, 0}, stream, params, ws);
  }
  if (ws.dbias) launch_bwd_dbias(params, ws, stream);
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd(const BwdParams& params, cudaStream_t stream) {
  using Stages = BwdStages<kHeadDim, kHeadDimV>;
  if (changes_scores(params.fwd)) {
    launch_bwd_tile<BwdTile<kHeadDim, kHeadDimV, Stages::kQ, Stages::kDout, true>, kDType>(params,
                                                                                           stream);
  } else {
    launch_bwd_tile<BwdTile<kHeadDim, kHeadDimV, Stages::kQ, Stages::kDout, false>, kDType>(params,
                                                                                            stream);
  }
}

template <DType kDType>
void launch_bwd_pair(const BwdParams& params, cudaStream_t stream) {
  if (changes_scores(params.fwd)) {
    launch_bwd_tile<BwdPairTile<true>, kDType>(params, stream);
  } else {
    launch_bwd_tile<BwdPairTile<false>, kDType>(params, stream);
  }
}

}  // namespace flash_cuda::sm100
