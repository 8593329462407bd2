// What a kernel is told: plain data, filled once in the binding and read on the device.
//
// Shapes stand beside the pointers. `total_*` shapes are the packed ones (cu_seqlens given).
// Strides are in elements; the last dimension of every tensor with a head dimension is contiguous.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_cuda {

// A window end without a limit. Small enough that row + kUnbounded never overflows an int.
constexpr int kUnbounded = 1 << 30;

enum class DType : int { kFloat16 = 0, kBFloat16 = 1, kFloat8E4M3 = 2, kFloat32 = 3 };

struct Stride {
  int64_t batch = 0;  // 0 for packed tensors; the page stride for a paged cache
  int64_t row = 0;
  int64_t head = 0;
};

struct FwdParams {
  // ---- tensors
  const void* q = nullptr;  // (batch, seqlen_q, num_heads_q, head_dim) or (total_q, ...)
  const void* k = nullptr;  // (batch | cache rows | pages, seqlen_kv | page_size, num_heads_kv,
                            // head_dim) or (total_kv, num_heads_kv, head_dim)
  const void* v = nullptr;  // like k, with head_dim_v
  void* out = nullptr;   // (batch, seqlen_q, num_heads_q, head_dim_v) or (total_q, ...), contiguous
  float* lse = nullptr;  // (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q), contiguous
  Stride q_stride, k_stride, v_stride, out_stride;
  int64_t lse_batch_stride = 0, lse_head_stride = 0;  // the row stride is 1

  DType dtype = DType::kBFloat16;      // of q, k, v
  DType out_dtype = DType::kBFloat16;  // of out: dtype, or bfloat16 for fp8 inputs

  // ---- sizes
  int batch = 0, num_heads_q = 0, num_heads_kv = 0, head_dim = 0, head_dim_v = 0;
  int seqlen_q =
      0;  // dense: rows of q. Packed: max_seqlen_q if hinted, else total_q (an upper bound)
  int seqlen_kv =
      0;  // dense: rows of k. Packed: hint or total_kv. Paged: pages a sequence * page_size
  int64_t total_q = 0, total_kv = 0;  // rows in all: batch * seqlen, or the packed total

  // ---- lengths of single sequences (device pointers, null where absent)
  const int* cu_seqlens_q = nullptr;  // (batch + 1): q, out and lse are packed
  const int* cu_seqlens_k = nullptr;  // (batch + 1): k and v are packed
  const int* seqused_q = nullptr;     // (batch): rows that count; the others give out 0, lse -inf
  const int* seqused_k = nullptr;     // (batch): keys that count
  const int* leftpad_k = nullptr;     // (batch): first key that counts

  // ---- cache
  const int* block_table =
      nullptr;  // (batch, pages a sequence): k and v are (pages, page_size, ...)
  int64_t block_table_stride = 0;
  int page_size = 0, num_pages = 0;
  const int* cache_batch_idx = nullptr;  // (batch): row of the cache that a sequence reads

  // ---- scores and masks
  float softmax_scale = 1.0f;
  float softcap = 0.0f;                                     // 0: none
  int window_left = kUnbounded, window_right = kUnbounded;  // causal: window_right = 0
  int attention_chunk = 0;                                  // 0: none
  bool top_left =
      false;            // align masks and ALiBi to the top left corner instead of the bottom right
  bool strict = false;  // exact row maxima and hardware exponentials everywhere

  const float* alibi_slopes = nullptr;  // (num_heads_q) or (batch, num_heads_q)
  int64_t alibi_batch_stride = 0;
  const void* bias =
      nullptr;  // (batch | 1, num_heads_q | 1, seqlen_q | 1, seqlen_kv); stride 0 = broadcast
  DType bias_dtype = DType::kFloat32;  // float32 or dtype
  int64_t bias_batch_stride = 0, bias_head_stride = 0, bias_row_stride = 0, bias_col_stride = 0;
  const float* sink = nullptr;  // (num_heads_q): one more logit a head, with no value

  const void* qv = nullptr;  // (batch, seqlen_q, num_heads_q, head_dim_v): adds qv . v to q . k
  Stride qv_stride;
  const float *q_descale = nullptr, *k_descale = nullptr,
              *v_descale = nullptr;  // (batch, num_heads_kv)
  int64_t q_descale_batch_stride = 0, q_descale_head_stride = 0;
  int64_t k_descale_batch_stride = 0, k_descale_head_stride = 0;
  int64_t v_descale_batch_stride = 0, v_descale_head_stride = 0;

  float dropout_p = 0.0f;
  const int64_t* rng_state = nullptr;  // (2): seed, offset; read on the device

  // ---- split-KV (see api/plan.h, which fills these from the shape)
  int num_splits = 1;            // parts of the KV range, each a partial (out, lse)
  int split_size = 0;            // > 0: keys a part, whatever the neighbours' lengths
  float* out_partial = nullptr;  // (num_splits, batch, seqlen_q, num_heads_q, head_dim_v) float32
  float* lse_partial = nullptr;  // (num_splits, batch, num_heads_q, seqlen_q) float32
  bool pack_gqa = false;         // query heads of one KV head become rows of one tile
  // The kernel deals out the keys of the whole call evenly, by the lengths that it finds on the
  // device, and writes out and lse itself; num_splits is what the plan expects, for show.
  bool dealt_out = false;
  // Where partials lie, dense and packed alike: row r of batch b in split s starts at
  // s * split + b * batch + r * row + head * head. Packed: batch is 0 and r counts from the start
  // of the packed tensor, (num_splits, total_q, heads, head_dim_v) and (num_splits, heads,
  // total_q).
  int64_t out_partial_split_stride = 0;
  Stride out_partial_stride;
  int64_t lse_partial_split_stride = 0, lse_partial_batch_stride = 0, lse_partial_head_stride = 0;

  // ---- launch
  void* workspace = nullptr;  // FwdKernel::workspace_bytes, 256-byte aligned, not initialised
  int num_sms = 0;
  int compute_capability = 0;  // 80, 86, 90, 100, ...
  int max_smem_per_block = 0;  // opt-in limit of the device, bytes
  bool unaligned = false;  // rows of q, k, v (dout, out) are not 16-byte aligned; set by launchers
};

// Bits of BwdParams::wanted.
enum Wanted : int { kWantDq = 1, kWantDk = 2, kWantDv = 4, kWantDbias = 8, kWantDsink = 16 };

// `fwd` describes the forward call whose gradient this is (out and lse are inputs here).
// Every wanted gradient is written whole: rows without keys, keys without rows, rows past a used
// length and packed rows past the last sequence get zeros.
struct BwdParams {
  FwdParams fwd;

  const void* dout = nullptr;  // like out; any strides, also 0, with a contiguous last dimension
  Stride dout_stride;
  const float* dlse = nullptr;                          // like lse, or null
  int64_t dlse_batch_stride = 0, dlse_head_stride = 0;  // the row stride is 1
  Stride out_stride;  // of the saved out (fwd.out_stride is what the forward wrote)

  void *dq = nullptr, *dk = nullptr, *dv = nullptr;  // like q, k, v; null where not wanted
  Stride dq_stride, dk_stride, dv_stride;
  float* dbias = nullptr;  // float32, shaped like bias, contiguous
  int64_t dbias_batch_stride = 0, dbias_head_stride = 0, dbias_row_stride = 0, dbias_col_stride = 0;
  float* dsink = nullptr;  // (num_heads_q) float32; zeroed by the binding

  bool deterministic = false;
  int wanted = kWantDq | kWantDk | kWantDv;

  void* workspace = nullptr;  // BwdKernel::workspace_bytes, 256-byte aligned, not initialised

  bool dbias_shared = false;  // several scores add to one element of dbias; set by launchers
};

// Merges num_splits partial results; a part without keys has lse -inf and is ignored.
struct CombineParams {
  const float* out_partial =
      nullptr;  // (splits, batch, seqlen, heads, head_dim_v), contiguous rows
  int64_t op_split_stride = 0, op_batch_stride = 0, op_row_stride = 0, op_head_stride = 0;
  const float* lse_partial = nullptr;  // (splits, batch, heads, seqlen)
  int64_t lp_split_stride = 0, lp_batch_stride = 0, lp_head_stride = 0, lp_row_stride = 0;
  void* out = nullptr;   // (batch, seqlen, heads, head_dim_v)
  float* lse = nullptr;  // (batch, heads, seqlen)
  DType out_dtype = DType::kFloat32;
  Stride out_stride;
  int64_t lse_batch_stride = 0, lse_head_stride = 0;
  int num_splits = 0, batch = 0, seqlen = 0, num_heads = 0, head_dim_v = 0;
};

// Writes new keys and values behind the cached ones, keys rotated on the way.
struct KvAppendParams {
  const void *k = nullptr,
             *v = nullptr;  // (batch, seqlen_new, num_heads_kv, head_dim | head_dim_v)
  Stride k_stride, v_stride;
  void *k_cache = nullptr, *v_cache = nullptr;  // (cache rows | pages, capacity | page_size, ...)
  Stride k_cache_stride, v_cache_stride;
  const int* cache_seqlens = nullptr;  // (batch): lengths before the append
  const int* block_table = nullptr;
  int64_t block_table_stride = 0;
  int page_size = 0, num_pages = 0, capacity = 0;
  const int* cache_batch_idx = nullptr;
  const void *rotary_cos = nullptr,
             *rotary_sin = nullptr;  // (positions, rotary_dim / 2), dtype of k
  int rotary_dim = 0, rotary_positions = 0;
  bool rotary_interleaved = true;
  DType dtype = DType::kBFloat16;
  int batch = 0, seqlen_new = 0, num_heads_kv = 0, head_dim = 0, head_dim_v = 0;
};

}  // namespace flash_cuda
