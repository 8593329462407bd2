#include "api/check.h"

#include <algorithm>
#include <cmath>

#include "api/check_tensor.h"
#include "common/host_device.h"

namespace flash_cuda {

namespace {

// Positions, window ends and their sums stay inside an int with this.
constexpr int64_t kMaxSeqlen = int64_t{1} << 29;
constexpr int64_t kMaxHeads = 1 << 20;
constexpr int64_t kMaxSplits = 256;
constexpr int64_t kMaxParts = 4096;  // that a split_size may cut the keys into
// Rows of all heads, and scores of a gradient of bias: bytes of results and workspaces, whatever a
// kernel pads and however many parts it keeps, stay inside 64 bits.
constexpr int64_t kMaxRows = int64_t{1} << 40;
constexpr double kMaxBiasScores = 0x1p58;
constexpr int64_t kMaxHeadDim = 1 << 16;
// Of factors of the logits, and one over it the least softcap: kernels keep them in float32.
constexpr double kMaxScale = 1e30;

// lse, sink, slopes and descales: float32, and float64 beside float64 inputs.
ScalarType statistics_dtype(const TensorInfo& q) {
  return q.dtype == ScalarType::kFloat64 ? ScalarType::kFloat64 : ScalarType::kFloat32;
}

void check_cu_seqlens(const TensorInfo& t) {
  if (!t.given()) return;
  check_dtype(t, ScalarType::kInt32);
  if (t.ndim != 1 || t.size(0) < 1) {
    refuse_value(t.name, " must have shape (batch + 1), got ", shape_text(t));
  }
  check_rows_contiguous(t);
}

void check_qkv_rank(const FwdArgs& a) {
  const int q_ndim = a.cu_seqlens_q.given() ? 3 : 4;
  if (a.q.ndim != q_ndim) {
    refuse_value(
        "q must have shape (batch, seqlen_q, num_heads_q, head_dim), or (total_q, "
        "num_heads_q, head_dim) with cu_seqlens_q; got ",
        shape_text(a.q), a.cu_seqlens_q.given() ? " with" : " without", " cu_seqlens_q");
  }
  const int kv_ndim = a.cu_seqlens_k.given() ? 3 : 4;
  for (const TensorInfo* t : {&a.k, &a.v}) {
    if (t->ndim == kv_ndim) continue;
    refuse_value(t->name,
                 " must have shape (batch, seqlen_kv, num_heads_kv, head_dim), (total_kv, "
                 "num_heads_kv, head_dim) with cu_seqlens_k, or (pages, page_size, num_heads_kv, "
                 "head_dim) with block_table; got ",
                 shape_text(*t), a.cu_seqlens_k.given() ? " with" : " without", " cu_seqlens_k");
  }
}

void check_heads(const FwdArgs& a, const Sizes& s) {
  if (a.v.size(-2) != s.num_heads_kv) {
    refuse_value("k and v must have the same number of heads, got ", s.num_heads_kv, " and ",
                 a.v.size(-2));
  }
  if (s.num_heads_q > kMaxHeads) {
    refuse_value("the number of heads of q can be at most ", kMaxHeads, ", got ", s.num_heads_q);
  }
  if (s.num_heads_kv < 1 || s.num_heads_q % s.num_heads_kv != 0) {
    refuse_value("the number of heads of q must be a multiple of that of k and v, got ",
                 s.num_heads_q, " and ", s.num_heads_kv);
  }
  if (a.k.size(-1) != s.head_dim) {
    refuse_value("q and k must have the same head_dim, got ", s.head_dim, " and ", a.k.size(-1));
  }
  const auto check_head_dim = [](const char* name, int64_t head_dim) {
    if (head_dim < 1 || head_dim > kMaxHeadDim) {
      refuse_value(name, " must be at least 1 and at most ", kMaxHeadDim, ", got ", head_dim);
    }
  };
  check_head_dim("head_dim of q and k", s.head_dim);
  check_head_dim("head_dim_v of v", s.head_dim_v);
}

// The length to plan for, of `total` packed rows. A hint of 0 cannot be right where there are rows,
// and must not make a call look empty.
int64_t longest(int64_t hint, int64_t total) {
  return hint < 0 ? total : std::min(std::max<int64_t>(hint, 1), total);
}

void check_length(int64_t n) {
  if (n > kMaxSeqlen) {
    refuse_value("batch, lengths and pages can be at most ", kMaxSeqlen, ", got ", n);
  }
}

void check_rows(const char* name, int64_t total, int64_t heads) {
  if (total > kMaxRows / max_of(heads, int64_t{1})) {
    refuse_value(name, " can have at most ", kMaxRows, " rows of all heads together, got ", total,
                 " of ", heads, " heads");
  }
}

// Batch, lengths and totals; refuses tensors that do not agree on them.
void check_lengths_shapes(const FwdArgs& a, Sizes& s) {
  check_cu_seqlens(a.cu_seqlens_q);
  check_cu_seqlens(a.cu_seqlens_k);
  const bool packed_q = a.cu_seqlens_q.given(), packed_kv = a.cu_seqlens_k.given();
  const bool paged = a.block_table.given();
  s.batch = packed_q ? a.cu_seqlens_q.size(0) - 1 : a.q.size(0);
  s.total_q = packed_q ? a.q.size(0) : s.batch * a.q.size(1);
  s.seqlen_q = packed_q ? a.q.size(0) : a.q.size(1);
  if (packed_q) s.seqlen_q = longest(a.max_seqlen_q, s.seqlen_q);

  const int leading = packed_kv ? 1 : 2;
  for (int i = 0; i < leading; ++i) {
    if (a.k.size(i) != a.v.size(i)) {
      refuse_value("k and v must have the same batch and length, got ", shape_text(a.k), " and ",
                   shape_text(a.v));
    }
  }
  if (paged) {
    if (packed_kv)
      refuse_value(
          "block_table and cu_seqlens_k exclude each other: give the lengths "
          "of a paged cache as seqused_k");
    if (a.cache_batch_idx.given()) {
      refuse_value(
          "block_table and cache_batch_idx exclude each other: choose rows of block_table");
    }
    check_dtype(a.block_table, ScalarType::kInt32);
    if (a.block_table.ndim != 2 || a.block_table.size(0) != s.batch) {
      refuse_value("block_table must have shape (batch, pages a sequence) = (", s.batch,
                   ", ...), got ", shape_text(a.block_table));
    }
    check_rows_contiguous(a.block_table);
    s.num_pages = a.k.size(0);
    s.page_size = a.k.size(1);
    check_length(s.page_size);
    check_length(a.block_table.size(1));
    if (s.page_size < 1) refuse_value("k must have pages of at least 1 row, got ", shape_text(a.k));
    s.seqlen_kv = a.block_table.size(1) * s.page_size;
    s.total_kv = s.num_pages * s.page_size;
  } else if (packed_kv) {
    if (a.cache_batch_idx.given()) {
      refuse_value("cache_batch_idx and cu_seqlens_k exclude each other");
    }
    if (a.cu_seqlens_k.size(0) - 1 != s.batch) {
      refuse_value("cu_seqlens_k must have shape (batch + 1) = (", s.batch + 1, ",), got ",
                   shape_text(a.cu_seqlens_k));
    }
    s.total_kv = a.k.size(0);
    s.seqlen_kv = longest(a.max_seqlen_k, s.total_kv);
  } else {
    if (!a.cache_batch_idx.given() && a.k.size(0) != s.batch) {
      refuse_value("k and v must have the batch of q (", s.batch,
                   ") or come with cache_batch_idx, "
                   "block_table or cu_seqlens_k; got shape ",
                   shape_text(a.k));
    }
    s.seqlen_kv = a.k.size(1);
    s.total_kv = a.k.size(0) * a.k.size(1);
  }
  for (int64_t n : {s.batch, s.seqlen_q, s.seqlen_kv, a.k.size(0)}) check_length(n);
  check_rows("q", s.total_q, s.num_heads_q);
  check_rows("k", s.total_kv, s.num_heads_kv);
}

void check_bias(const FwdArgs& a, const Sizes& s) {
  const TensorInfo& bias = a.bias;
  if (!bias.given()) return;
  const bool only_float32 =
      a.q.dtype == ScalarType::kFloat8E4M3 || a.q.dtype == ScalarType::kFloat32;
  if (bias.dtype != ScalarType::kFloat32 && (only_float32 || bias.dtype != a.q.dtype)) {
    refuse_type("bias must be float32", only_float32 ? "" : " or ",
                only_float32 ? "" : name_of(a.q.dtype), ", got ", name_of(bias.dtype));
  }
  if (a.cu_seqlens_q.given() || a.cu_seqlens_k.given()) {
    refuse_value("bias needs dense q and k, got cu_seqlens; alibi_slopes and sink work with them");
  }
  const int64_t full[4] = {s.batch, s.num_heads_q, s.seqlen_q, s.seqlen_kv};
  bool fits = bias.ndim == 4 && bias.size(3) == full[3];
  for (int i = 0; fits && i < 3; ++i) fits = bias.size(i) == full[i] || bias.size(i) == 1;
  if (!fits) {
    refuse_value(
        "bias must have shape (batch or 1, num_heads_q or 1, seqlen_q or 1, seqlen_kv) "
        "with (",
        full[0], ", ", full[1], ", ", full[2], ", ", full[3], "), got ", shape_text(bias));
  }
}

void check_score_tensors(const FwdArgs& a, const Sizes& s) {
  check_bias(a, s);
  const TensorInfo& slopes = a.alibi_slopes;
  if (slopes.given()) {
    check_dtype(slopes, statistics_dtype(a.q));
    const bool one = slopes.ndim == 1 && slopes.size(0) == s.num_heads_q;
    const bool each =
        slopes.ndim == 2 && slopes.size(0) == s.batch && slopes.size(1) == s.num_heads_q;
    if (!one && !each) {
      refuse_value("alibi_slopes must have shape (num_heads_q) = (", s.num_heads_q,
                   ",) or (batch, num_heads_q) = (", s.batch, ", ", s.num_heads_q, "), got ",
                   shape_text(slopes));
    }
    check_rows_contiguous(slopes);
  }
  if (a.sink.given()) {
    check_dtype(a.sink, statistics_dtype(a.q));
    check_shape(a.sink, {s.num_heads_q}, "(num_heads_q)");
    check_rows_contiguous(a.sink);
  }
  if (a.qv.given()) {
    check_dtype(a.qv, a.q.dtype);
    bool fits = a.qv.ndim == a.q.ndim && a.qv.size(-1) == s.head_dim_v;
    for (int i = 0; fits && i < a.q.ndim - 1; ++i) fits = a.qv.size(i) == a.q.size(i);
    if (!fits) {
      refuse_value("qv must have the shape of q with head_dim_v = ", s.head_dim_v,
                   " as its last dimension, got ", shape_text(a.qv), " beside ", shape_text(a.q));
    }
    check_rows_contiguous(a.qv);
  }
  for (const TensorInfo* t : {&a.q_descale, &a.k_descale, &a.v_descale}) {
    if (!t->given()) continue;
    if (a.q.dtype != ScalarType::kFloat8E4M3) {
      refuse_type(t->name, " is for float8_e4m3fn inputs, got ", name_of(a.q.dtype), " q, k and v");
    }
    check_dtype(*t, ScalarType::kFloat32);
    check_shape(*t, {s.batch, s.num_heads_kv}, "(batch, num_heads_kv)");
  }
}

void check_window_end(const char* name, int64_t end) {
  if (end < -1) refuse_value(name, " must be -1 (unlimited) or at least 0, got ", end);
}

void check_at_least_0(const char* name, int64_t value, const char* meaning_of_0) {
  if (value < 0) refuse_value(name, " must be at least 0", meaning_of_0, ", got ", value);
}

void check_splits(const FwdArgs& a, const Sizes& s) {
  if (a.num_splits < 0 || a.num_splits > kMaxSplits) {
    refuse_value("num_splits must be 0 (automatic) to ", kMaxSplits, ", got ", a.num_splits);
  }
  check_at_least_0("split_size", a.split_size, " (0: not fixed)");
  if (a.split_size > 0 && a.num_splits > 1) {
    refuse_value("num_splits and split_size exclude each other, got ", a.num_splits, " and ",
                 a.split_size);
  }
  const int64_t least = ceil_div(s.seqlen_kv, kMaxParts);
  if (a.split_size > 0 && a.split_size < least) {
    refuse_value("split_size must be at least ", least, " for ", s.seqlen_kv, " keys (", kMaxParts,
                 " parts), got ", a.split_size);
  }
}

void check_options(const FwdArgs& a) {
  check_window_end("window_left", a.window_left);
  check_window_end("window_right", a.window_right);
  check_at_least_0("attention_chunk", a.attention_chunk, " (0: no chunks)");
  if (a.has_softmax_scale && !(std::abs(a.softmax_scale) <= kMaxScale)) {
    refuse_value("softmax_scale must be finite and at most ", kMaxScale, ", got ", a.softmax_scale);
  }
  if (a.softcap != 0.0 && !(a.softcap >= 1.0 / kMaxScale && a.softcap <= kMaxScale)) {
    refuse_value("softcap must be 0 (none) or finite, ", 1.0 / kMaxScale, " to ", kMaxScale,
                 ", got ", a.softcap);
  }
  if (a.softcap != 0.0 && a.has_softmax_scale &&
      std::abs(a.softmax_scale) / a.softcap > kMaxScale) {
    refuse_value("softmax_scale must be at most ", kMaxScale, " times softcap, got ",
                 a.softmax_scale, " and ", a.softcap);
  }
  if (!(a.dropout_p >= 0.0 && a.dropout_p < 1.0)) {
    refuse_value("dropout_p must be at least 0 and under 1, got ", a.dropout_p);
  }
  if (a.dropout_p > 0.0 && !a.rng_state.given()) {
    refuse_value("rng_state must be given when dropout_p > 0, got dropout_p ", a.dropout_p,
                 " without it: an int64 tensor [seed, offset]");
  }
  if (a.rng_state.given()) {
    check_dtype(a.rng_state, ScalarType::kInt64);
    check_shape(a.rng_state, {2}, "(2)");
    check_rows_contiguous(a.rng_state);
  }
  if (a.pack_gqa < -1 || a.pack_gqa > 1) {
    refuse_value("pack_gqa must be -1 (automatic), 0 or 1, got ", a.pack_gqa);
  }
  if (a.max_seqlen_q != kNotGiven) check_at_least_0("max_seqlen_q", a.max_seqlen_q, "");
  if (a.max_seqlen_k != kNotGiven) check_at_least_0("max_seqlen_k", a.max_seqlen_k, "");
}

void check_devices(const FwdArgs& a) {
  for_each_tensor(const_cast<FwdArgs&>(a), [&](const TensorInfo& t) { check_device(t, a.q); });
}

}  // namespace

Sizes check_fwd(const FwdArgs& a) {
  check_devices(a);
  check_qkv_dtype(a.q, a.k, a.v);
  check_qkv_rank(a);
  Sizes s;
  s.num_heads_q = a.q.size(-2);
  s.num_heads_kv = a.k.size(-2);
  s.head_dim = a.q.size(-1);
  s.head_dim_v = a.v.size(-1);
  check_heads(a, s);
  check_lengths_shapes(a, s);
  for (const TensorInfo* t : {&a.q, &a.k, &a.v}) check_rows_contiguous(*t);
  for (const TensorInfo* t : {&a.seqused_q, &a.seqused_k, &a.leftpad_k, &a.cache_batch_idx}) {
    check_lengths_vector(*t, s.batch);
  }
  check_score_tensors(a, s);
  check_options(a);
  check_splits(a, s);
  return s;
}

Sizes check_bwd(const BwdArgs& b) {
  const FwdArgs& a = b.fwd;
  const Sizes s = check_fwd(a);
  if (a.q.dtype == ScalarType::kFloat8E4M3) {
    refuse_type("q must be float16, bfloat16, float32 or float64 in the backward, got ",
                name_of(a.q.dtype));
  }
  const bool packed = a.cu_seqlens_q.given();
  for (const TensorInfo* t : {&b.dout, &b.out}) {
    check_device(*t, a.q);
    check_dtype(*t, a.q.dtype);
    if (packed) {
      check_shape(*t, {s.total_q, s.num_heads_q, s.head_dim_v},
                  "(total_q, num_heads_q, head_dim_v)");
    } else {
      check_shape(*t, {s.batch, s.seqlen_q, s.num_heads_q, s.head_dim_v},
                  "(batch, seqlen_q, num_heads_q, head_dim_v)");
    }
  }
  for (const TensorInfo* t : {&b.dlse, &b.lse}) {
    if (!t->given()) continue;
    check_device(*t, a.q);
    check_dtype(*t, statistics_dtype(a.q));
    if (packed) {
      check_shape(*t, {s.num_heads_q, s.total_q}, "(num_heads_q, total_q)");
    } else {
      check_shape(*t, {s.batch, s.num_heads_q, s.seqlen_q}, "(batch, num_heads_q, seqlen_q)");
    }
  }
  if (b.wanted < 0 || b.wanted > 31) {
    refuse_value("wanted must be a sum of 1 (dq), 2 (dk), 4 (dv), 8 (dbias) and 16 (dsink), got ",
                 b.wanted);
  }
  if ((b.wanted & 8) && !a.bias.given())
    refuse_value("wanted asks for dbias, but bias is not given");
  const double scores = static_cast<double>(s.total_q * s.num_heads_q) * s.seqlen_kv;
  if ((b.wanted & 8) && scores > kMaxBiasScores) {
    refuse_value(
        "a gradient of bias can sum at most 2^58 scores, got batch * num_heads_q * "
        "seqlen_q * seqlen_kv = ",
        scores);
  }
  if ((b.wanted & 16) && !a.sink.given())
    refuse_value("wanted asks for dsink, but sink is not given");
  return s;
}

}  // namespace flash_cuda
