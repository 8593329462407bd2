// Tensor maps over the rows of a sequence, so that the copy engine stops at its last row.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/params.h"
#include "common/tensor_map.h"

namespace flash_cuda {

// Coordinates of a tensor map beside the column; see tma_rows.cuh for the copies.
struct MapRows {
  int row0, c2, c3;  // row r of the sequence is (column, row0 + r, c2, c3)
  bool clipped;      // and kWrapSteps
};

// Dense: (column, row, head, batch), and the tensor ends where the sequence does. Clipped: two
// dimensions run over the rows, (column, row1, row2, head, wrap), both with the row stride. A
// sequence of `len` rows from `first` on uses row1 = kWrapSteps - len + r and row2 = first + len:
// rows past the end leave the bounds of row1 and read as zero. The kWrapSteps rows too many are
// taken off the address by the last dimension.
struct RowMap {
  int clipped = 0;
  int batch_rows = 0;  // rows between the batches of a dense tensor

  FLASH_CUDA_HOST_DEVICE static MapRows packed(int first, int len, int head) {
    return {kWrapSteps - len, first + len, head, true};
  }
  FLASH_CUDA_HOST_DEVICE MapRows locate(int first, int len, int head, int batch) const {
    if (!clipped) return {first, head, batch, false};
    return {kWrapSteps - len, batch * batch_rows + first + len, head, true};
  }
};

// A tensor of rows x heads x batch.
struct MapSource {
  const void* base;
  Stride stride;
  int columns;
  int64_t rows;  // of a batch, or of the packed tensor
  int heads, batch;
};

// The tensors of a forward call.
struct FwdSources {
  bool packed_q, packed_kv;
  MapSource q, k, v, out;

  static FwdSources make(const FwdParams& p) {
    const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
    const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
    const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv;
    return {packed_q,
            packed_kv,
            {p.q, p.q_stride, p.head_dim, rows_q, p.num_heads_q, p.batch},
            {p.k, p.k_stride, p.head_dim, rows_kv, p.num_heads_kv, p.batch},
            {p.v, p.v_stride, p.head_dim_v, rows_kv, p.num_heads_kv, p.batch},
            {p.out, p.out_stride, p.head_dim_v, rows_q, p.num_heads_q, p.batch}};
  }
};

inline RowMap row_map(const MapSource& t, bool packed, bool clipped) {
  RowMap map;
  map.clipped = packed || clipped;
  map.batch_rows = packed ? 0 : static_cast<int>(t.stride.batch / t.stride.row);
  return map;
}

// Boxes of box_columns x box_rows; a row of a box is one swizzle width.
inline CUtensorMap rows_tensor_map(const MapSource& t, const RowMap& rows, int box_columns,
                                   int box_rows, DType dtype) {
  TensorMapShape shape{};
  if (rows.clipped) {
    const int64_t last = int64_t(rows.batch_rows) * (rows.batch_rows ? t.batch - 1 : 0);
    shape.dims[1] = kWrapSteps;
    shape.dims[2] = last + t.rows + 1;
    shape.dims[3] = t.heads;
    shape.strides[1] = t.stride.row;
    shape.strides[2] = t.stride.head;
    shape.wrap_bytes = kWrapTurn - static_cast<uint64_t>(t.stride.row) * 2;
  } else {
    shape.dims[1] = t.rows;
    shape.dims[2] = t.heads;
    shape.dims[3] = t.batch;
    shape.strides[1] = t.stride.head;
    shape.strides[2] = t.stride.batch;
  }
  shape.base = t.base;
  shape.dims[0] = t.columns;
  shape.strides[0] = t.stride.row;
  shape.box[0] = box_columns;
  shape.box[1] = box_rows;
  shape.box[2] = shape.box[3] = 1;
  shape.swizzle_bytes = box_columns * 2;
  return make_tensor_map(shape, dtype);
}

// A tensor with an element for every score, a bias or its gradient; a stride of 0 repeats.
struct ScoreSource {
  const void* base;
  int64_t batch_stride, head_stride, row_stride;
  DType dtype;
};

// Its map over (key, row, head, batch): boxes of 128 bytes of a row.
inline CUtensorMap scores_tensor_map(const ScoreSource& t, const FwdParams& p, int box_rows) {
  return make_tensor_map({t.base,
                          {p.seqlen_kv, t.row_stride ? p.seqlen_q : 1,
                           t.head_stride ? p.num_heads_q : 1, t.batch_stride ? p.batch : 1},
                          {t.row_stride, t.head_stride, t.batch_stride},
                          {t.dtype == DType::kFloat32 ? 32 : 64, box_rows, 1, 1},
                          128},
                         t.dtype);
}

// The copy engine wants addresses and strides of whole 16-byte units, and no repeated rows.
inline bool map_serves(const MapSource& t, bool packed) {
  // Below 2^33, so that a row is less than the turn of a clipped map.
  const auto fits = [](int64_t elements, int64_t count) {
    return count <= 1 || (elements > 0 && elements % 8 == 0 && elements < (int64_t(1) << 33));
  };
  return reinterpret_cast<uintptr_t>(t.base) % 16 == 0 && fits(t.stride.row, t.rows) &&
         fits(t.stride.head, t.heads) && (packed || fits(t.stride.batch, t.batch));
}

// Sequences with used lengths are found by counting rows through the batch.
inline bool rows_count_through(const MapSource& t) {
  return t.batch <= 1 || (t.stride.row > 0 && t.stride.batch % t.stride.row == 0);
}

}  // namespace flash_cuda
