// Tensor maps and the chain of kernels of a backward call with head dims up to 256.
#pragma once

#include "common/bwd_workspace.h"
#include "common/launch.h"
#include "sm100/bwd.h"
#include "sm100/bwd_place.h"
#include "sm100/bwd_wide_kernel.cuh"

namespace flash_cuda::sm100 {

// lse and delta of the rows, and dbias: other gradients are written where they belong.
inline BwdWorkspace bwd_wide_workspace(const BwdParams& params, size_t* bytes) {
  BwdParams stats = params;
  stats.wanted &= ~kWantDq;
  BwdWorkspace ws = BwdWorkspace::shape(stats, 128, 256, 1);
  *bytes = ws.place(stats, static_cast<char*>(params.workspace));
  return ws;
}

template <class Tile>
BwdWideArgs make_bwd_wide_args(const BwdParams& params, const BwdWorkspace& workspace) {
  const FwdParams& p = params.fwd;
  BwdWideArgs args{};
  args.params = params;
  args.workspace = workspace;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv;
  const auto map = [&](WideTensor* to, const MapSource& t, bool packed, bool clipped) {
    if (!t.base) return;
    to->rows = row_map(t, packed, clipped);
    to->map = rows_tensor_map(t, to->rows, Tile::kBox, Tile::kBox, p.dtype);
  };
  const auto map_q = [&](WideTensor* to, const void* base, const Stride& stride, int columns,
                         bool clipped) {
    map(to, {base, stride, columns, rows_q, p.num_heads_q, p.batch}, packed_q, clipped);
  };
  const auto map_kv = [&](WideTensor* to, const void* base, const Stride& stride, int columns,
                          bool clipped) {
    map(to, {base, stride, columns, rows_kv, p.num_heads_kv, p.batch}, packed_kv, clipped);
  };
  WideTensor* queries = Tile::kKeysStay ? args.pass : args.stay;
  WideTensor* keys = Tile::kKeysStay ? args.stay : args.pass;
  map_q(&queries[0], p.q, p.q_stride, p.head_dim, p.seqused_q);
  map_q(&queries[1], params.dout, params.dout_stride, p.head_dim_v, p.seqused_q);
  map_kv(&keys[0], p.k, p.k_stride, p.head_dim, p.seqused_k);
  map_kv(&keys[1], p.v, p.v_stride, p.head_dim_v, p.seqused_k);
  if (Tile::kKeysStay) {
    map_kv(&args.grad[0], params.dk, params.dk_stride, p.head_dim, false);
    map_kv(&args.grad[1], params.dv, params.dv_stride, p.head_dim_v, false);
  } else {
    map_q(&args.grad[0], params.dq, params.dq_stride, p.head_dim, false);
  }
  // The longest first under a causal mask: low keys, late queries.
  const int heads = Tile::kKeysStay ? p.num_heads_kv : p.num_heads_q;
  const int rows = Tile::kKeysStay ? p.seqlen_kv : p.seqlen_q;
  args.schedule = DenseSchedule{ceil_div(rows, Tile::kBlock), heads, p.batch, 1, !Tile::kKeysStay};
  return args;
}

template <class Tile, DType kDType>
void launch_bwd_wide_pass(const BwdParams& params, const BwdWorkspace& workspace,
                          cudaStream_t stream) {
  static std::atomic<uint64_t> smem_allowed{0};
  const FwdParams& p = params.fwd;
  const BwdWideArgs args = make_bwd_wide_args<Tile>(params, workspace);
  const bool packed = Tile::kKeysStay ? p.cu_seqlens_k : p.cu_seqlens_q;
  const int64_t rows = Tile::kKeysStay ? p.total_kv : p.total_q;
  const int64_t pairs = packed ? packed_blocks(rows, p.batch, Tile::kBlock) * args.schedule.heads
                               : args.schedule.size();
  if (pairs <= 0) return;
  auto* kernel = bwd_wide_kernel<Tile, kDType>;
  allow_dynamic_smem(kernel, Tile::kSmemBytes, smem_allowed);
  launch_kernel(kernel,
                {dim3(static_cast<unsigned>(2 * pairs)), Tile::kThreads, Tile::kSmemBytes, 2},
                stream, args);
}

template <bool kGeneral, DType kDType>
void launch_bwd_wide_passes(BwdParams params, const BwdWorkspace& ws, cudaStream_t stream) {
  place_dbias(params, ws, stream);
  if (params.wanted & (kWantDk | kWantDv | kWantDbias)) {
    launch_bwd_wide_pass<BwdWideTile<true, kGeneral>, kDType>(params, ws, stream);
  }
  if (params.wanted & kWantDq) {
    launch_bwd_wide_pass<BwdWideTile<false, kGeneral>, kDType>(params, ws, stream);
  }
}

template <DType kDType>
void launch_bwd_wide(const BwdParams& params, cudaStream_t stream) {
  size_t bytes;
  const BwdWorkspace ws = bwd_wide_workspace(params, &bytes);
  launch_bwd_preprocess(params, ws, stream);
  if (params.wanted & kWantDsink) launch_bwd_sink(params, ws, stream);
  if (changes_scores(params.fwd)) {
    launch_bwd_wide_passes<true, kDType>(params, ws, stream);
  } else {
    launch_bwd_wide_passes<false, kDType>(params, ws, stream);
  }
  if (ws.dbias) launch_bwd_dbias(params, ws, stream);
}

}  // namespace flash_cuda::sm100
