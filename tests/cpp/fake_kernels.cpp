// A library of "emulated" kernels that are plain loops over the params: what a kernel is told is
// all they know, so a wrong pointer, stride or size of the binding shows as a wrong number.
// float32 rows of every op; a bfloat16 forward row; rows that refuse, to test selection.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "common/kernel_table.h"
#include "common/mask.h"
#include "common/seqlen.h"

namespace {

using namespace flash_cuda;

float load(const void* data, DType type, int64_t i) {
  if (type == DType::kFloat32) return static_cast<const float*>(data)[i];
  if (type != DType::kBFloat16) throw std::runtime_error("dtype");
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(data)[i]} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void store(void* data, DType type, int64_t i, float value) {
  if (type == DType::kFloat32) {
    static_cast<float*>(data)[i] = value;
    return;
  }
  if (type != DType::kBFloat16) throw std::runtime_error("dtype");
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits += 0x7fff + (bits >> 16 & 1);  // to nearest even
  static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits >> 16);
}

int64_t at(const Stride& s, int64_t batch, int64_t row, int64_t head) {
  return batch * s.batch + row * s.row + head * s.head;
}

// Element 0 of key row j of a sequence.
int64_t kv_at(const FwdParams& p, const SeqInfo& s, int b, const Stride& stride, int j, int head) {
  int64_t batch = s.kv_batch, row = s.kv_row0 + j;
  if (p.block_table) {
    const int page = p.block_table[b * p.block_table_stride + row / p.page_size];
    if (page < 0 || page >= p.num_pages) throw std::runtime_error("page");
    batch = page;
    row %= p.page_size;
  }
  return at(stride, batch, row, head);
}

struct Score {
  float value, cap_derivative;  // of the value by the uncapped scaled product
};

Score score(const FwdParams& p, const SeqInfo& s, int b, int h, int i, int j) {
  const int kv_head = h / (p.num_heads_q / p.num_heads_kv);
  const int64_t q = at(p.q_stride, s.q_batch, s.q_row0 + i, h);
  const int64_t k = kv_at(p, s, b, p.k_stride, j, kv_head);
  double dot = 0;
  for (int d = 0; d < p.head_dim; ++d) dot += load(p.q, p.dtype, q + d) * load(p.k, p.dtype, k + d);
  if (p.qv) {
    const int64_t qv = at(p.qv_stride, s.q_batch, s.q_row0 + i, h);
    const int64_t v = kv_at(p, s, b, p.v_stride, j, kv_head);
    for (int d = 0; d < p.head_dim_v; ++d) {
      dot += load(p.qv, p.dtype, qv + d) * load(p.v, p.dtype, v + d);
    }
  }
  float x = static_cast<float>(dot) * p.softmax_scale, derivative = 1;
  if (p.softcap > 0) {
    const float t = std::tanh(x / p.softcap);
    x = p.softcap * t;
    derivative = 1 - t * t;
  }
  const int offset = p.top_left ? 0 : s.seqlen_kv - s.seqlen_q;
  if (p.alibi_slopes) {
    const float slope = p.alibi_slopes[b * p.alibi_batch_stride + h];
    x -= slope * static_cast<float>(std::abs(i + offset - j));
  }
  if (p.bias) {
    x += load(p.bias, p.bias_dtype,
              b * p.bias_batch_stride + h * p.bias_head_stride + i * p.bias_row_stride +
                  j * p.bias_col_stride);
  }
  return {x, derivative};
}

// One row over the keys [begin, end): returns lse, adds the normalised output to `out`.
float attend(const FwdParams& p, const SeqInfo& s, int b, int h, int i, int begin, int end,
             bool with_sink, std::vector<float>& out) {
  const Mask mask = Mask::make(p, s.seqlen_q, s.seqlen_kv);
  begin = std::max(begin, mask.kv_begin(i));
  end = std::min(end, mask.kv_end(i));
  std::fill(out.begin(), out.end(), 0.f);
  std::vector<float> scores;
  float most = with_sink ? p.sink[h] : -INFINITY;
  for (int j = begin; j < end; ++j) {
    scores.push_back(score(p, s, b, h, i, j).value);
    most = std::max(most, scores.back());
  }
  if (most == -INFINITY) return -INFINITY;
  float sum = with_sink ? std::exp(p.sink[h] - most) : 0;
  for (float x : scores) sum += std::exp(x - most);
  for (size_t n = 0; n < scores.size(); ++n) {
    const float weight = std::exp(scores[n] - most) / sum;
    const int64_t v = kv_at(p, s, b, p.v_stride, begin + static_cast<int>(n),
                            h / (p.num_heads_q / p.num_heads_kv));
    for (int d = 0; d < p.head_dim_v; ++d) out[d] += weight * load(p.v, p.dtype, v + d);
  }
  return most + std::log(sum);
}

// An empty grid or tensor map cannot be launched: the binding keeps them away from kernels.
void check_not_empty(const FwdParams& p) {
  if (p.batch < 1 || p.total_q < 1 || p.seqlen_q < 1 || p.total_kv < 1 || p.seqlen_kv < 1) {
    throw std::runtime_error("nothing to launch");
  }
}

void fill_workspace(void* workspace, size_t size) {
  if (reinterpret_cast<uintptr_t>(workspace) % 64 != 0) throw std::runtime_error("workspace");
  std::memset(workspace, 0xff, size);
}

constexpr size_t kWorkspace = 1000;
size_t fwd_workspace(const FwdParams&) { return kWorkspace; }
size_t bwd_workspace(const BwdParams&) { return kWorkspace; }

void launch_fwd(const FwdParams& p, cudaStream_t) {
  check_not_empty(p);
  fill_workspace(p.workspace, kWorkspace);
  if (p.out_partial || p.num_splits != 1) throw std::runtime_error("splits");
  std::vector<float> row(p.head_dim_v);
  if (p.cu_seqlens_q) {  // rows behind the last sequence
    for (int64_t n = 0; n < p.total_q * p.num_heads_q * p.head_dim_v; ++n) {
      store(p.out, p.out_dtype, n, 0);
    }
    std::fill(p.lse, p.lse + p.num_heads_q * p.total_q, -INFINITY);
  }
  for (int b = 0; b < p.batch; ++b) {
    const SeqInfo s = seq_info(p, b);
    if (s.seqlen_q_slot > p.seqlen_q) throw std::runtime_error("seqlen_q is no bound");
    for (int h = 0; h < p.num_heads_q; ++h) {
      for (int i = 0; i < s.seqlen_q_slot; ++i) {
        float lse = -INFINITY;
        std::fill(row.begin(), row.end(), 0.f);
        if (i < s.seqlen_q) lse = attend(p, s, b, h, i, 0, s.seqlen_kv, p.sink, row);
        const int64_t o = at(p.out_stride, s.q_batch, s.q_row0 + i, h);
        for (int d = 0; d < p.head_dim_v; ++d) store(p.out, p.out_dtype, o + d, row[d]);
        p.lse[s.q_batch * p.lse_batch_stride + h * p.lse_head_stride + s.q_row0 + i] = lse;
      }
    }
  }
}

void launch_decode(const FwdParams& p, cudaStream_t) {
  check_not_empty(p);
  fill_workspace(p.workspace, kWorkspace);
  if (!p.out_partial || !p.lse_partial) throw std::runtime_error("no room for partials");
  std::vector<float> row(p.head_dim_v);
  for (int b = 0; b < p.batch; ++b) {
    const SeqInfo s = seq_info(p, b);
    const int part = p.split_size > 0 ? p.split_size : ceil_div(s.seqlen_kv, p.num_splits);
    for (int n = 0; n < p.num_splits; ++n) {
      for (int h = 0; h < p.num_heads_q; ++h) {
        for (int i = 0; i < s.seqlen_q_slot; ++i) {
          float lse = -INFINITY;
          const int end = std::min((n + 1) * part, s.seqlen_kv);
          std::fill(row.begin(), row.end(), NAN);  // of a part without keys: never read
          if (i < s.seqlen_q) {
            lse = attend(p, s, b, h, i, n * part, end, p.sink && n == 0, row);
          }
          const int64_t r = s.q_row0 + i;
          float* out = p.out_partial + n * p.out_partial_split_stride +
                       at(p.out_partial_stride, s.q_batch, r, h);
          std::copy(row.begin(), row.end(), out);
          p.lse_partial[n * p.lse_partial_split_stride + s.q_batch * p.lse_partial_batch_stride +
                        h * p.lse_partial_head_stride + r] = lse;
        }
      }
    }
  }
}

void combine(const CombineParams& c, cudaStream_t) {
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.num_heads; ++h) {
      for (int r = 0; r < c.seqlen; ++r) {
        const auto lse_of = [&](int n) {
          return c.lse_partial[n * c.lp_split_stride + b * c.lp_batch_stride +
                               h * c.lp_head_stride + r * c.lp_row_stride];
        };
        float most = -INFINITY, sum = 0;
        for (int n = 0; n < c.num_splits; ++n) most = std::max(most, lse_of(n));
        for (int n = 0; n < c.num_splits && most > -INFINITY; ++n)
          sum += std::exp(lse_of(n) - most);
        for (int d = 0; d < c.head_dim_v; ++d) {
          float x = 0;
          for (int n = 0; n < c.num_splits; ++n) {
            if (lse_of(n) == -INFINITY) continue;
            x += std::exp(lse_of(n) - most) / sum *
                 c.out_partial[n * c.op_split_stride + b * c.op_batch_stride + r * c.op_row_stride +
                               h * c.op_head_stride + d];
          }
          store(c.out, c.out_dtype, at(c.out_stride, b, r, h) + d, x);
        }
        c.lse[b * c.lse_batch_stride + h * c.lse_head_stride + r] =
            most > -INFINITY ? most + std::log(sum) : -INFINITY;
      }
    }
  }
}

void launch_bwd(const BwdParams& p, cudaStream_t) {
  const FwdParams& f = p.fwd;
  check_not_empty(f);
  fill_workspace(p.workspace, kWorkspace);
  if (!p.dq != !(p.wanted & kWantDq) || !p.dk != !(p.wanted & kWantDk) ||
      !p.dv != !(p.wanted & kWantDv) || !p.dbias != !(p.wanted & kWantDbias) ||
      !p.dsink != !(p.wanted & kWantDsink)) {
    throw std::runtime_error("gradients and wanted do not agree");
  }
  const bool packed_q = f.cu_seqlens_q, packed_kv = f.cu_seqlens_k;
  const int64_t q_rows = packed_q ? f.total_q : int64_t{f.batch} * f.seqlen_q;
  const int64_t kv_rows = packed_kv ? f.total_kv : int64_t{f.batch} * f.seqlen_kv;
  std::vector<float> dq(q_rows * f.num_heads_q * f.head_dim), no_dq;
  std::vector<float> dk(kv_rows * f.num_heads_kv * f.head_dim);
  std::vector<float> dv(kv_rows * f.num_heads_kv * f.head_dim_v);
  const auto dbias_of = [&p](int b, int h, int i, int j) -> float& {
    return p.dbias[b * p.dbias_batch_stride + h * p.dbias_head_stride + i * p.dbias_row_stride +
                   j * p.dbias_col_stride];
  };
  for (int b = 0; p.dbias && b < f.batch; ++b) {
    for (int h = 0; h < f.num_heads_q; ++h) {
      for (int i = 0; i < f.seqlen_q; ++i) {
        for (int j = 0; j < f.seqlen_kv; ++j) dbias_of(b, h, i, j) = 0.0f;
      }
    }
  }
  for (int b = 0; b < f.batch; ++b) {
    const SeqInfo s = seq_info(f, b);
    const Mask mask = Mask::make(f, s.seqlen_q, s.seqlen_kv);
    for (int h = 0; h < f.num_heads_q; ++h) {
      const int kv_head = h / (f.num_heads_q / f.num_heads_kv);
      for (int i = 0; i < s.seqlen_q; ++i) {
        const int64_t row = s.q_row0 + i;
        const float lse = f.lse[s.q_batch * f.lse_batch_stride + h * f.lse_head_stride + row];
        if (lse == -INFINITY) continue;
        const int64_t o = at(p.out_stride, s.q_batch, row, h);
        const int64_t g = at(p.dout_stride, s.q_batch, row, h);
        double delta = 0;
        for (int d = 0; d < f.head_dim_v; ++d) {
          delta += load(f.out, f.dtype, o + d) * load(p.dout, f.dtype, g + d);
        }
        if (p.dlse) {
          delta -= p.dlse[s.q_batch * p.dlse_batch_stride + h * p.dlse_head_stride + row];
        }
        if (p.dsink) p.dsink[h] -= static_cast<float>(std::exp(f.sink[h] - lse) * delta);
        const int64_t q = at(f.q_stride, s.q_batch, row, h);
        for (int j = mask.kv_begin(i); j < mask.kv_end(i); ++j) {
          const int64_t k = kv_at(f, s, b, f.k_stride, j, kv_head);
          const int64_t v = kv_at(f, s, b, f.v_stride, j, kv_head);
          const Score x = score(f, s, b, h, i, j);
          const double weight = std::exp(x.value - lse);
          double dp = 0;
          const int64_t dv_row = at(p.dv_stride, s.kv_batch, s.kv_row0 + j, kv_head);
          const int64_t dk_row = at(p.dk_stride, s.kv_batch, s.kv_row0 + j, kv_head);
          const int64_t dq_row = at(p.dq_stride, s.q_batch, row, h);
          for (int d = 0; d < f.head_dim_v; ++d) {
            const float dout = load(p.dout, f.dtype, g + d);
            dp += dout * load(f.v, f.dtype, v + d);
            dv[dv_row + d] += static_cast<float>(weight * dout);
          }
          const double ds = weight * (dp - delta);
          if (p.dbias) dbias_of(b, h, i, j) += static_cast<float>(ds);
          const double dx = ds * x.cap_derivative * f.softmax_scale;
          for (int d = 0; d < f.head_dim; ++d) {
            dq[dq_row + d] += static_cast<float>(dx * load(f.k, f.dtype, k + d));
            dk[dk_row + d] += static_cast<float>(dx * load(f.q, f.dtype, q + d));
          }
        }
      }
    }
  }
  const auto write = [&](void* to, const std::vector<float>& from) {
    for (size_t n = 0; to && n < from.size(); ++n)
      store(to, f.dtype, static_cast<int64_t>(n), from[n]);
  };
  write(p.dq, dq);
  write(p.dk, dk);
  write(p.dv, dv);
}

void kv_append(const KvAppendParams& p, cudaStream_t) {
  for (int b = 0; b < p.batch; ++b) {
    for (int t = 0; t < p.seqlen_new; ++t) {
      int64_t row = p.cache_seqlens[b] + t;
      if (row >= p.capacity) continue;
      int64_t batch = p.cache_batch_idx ? p.cache_batch_idx[b] : b;
      const int64_t position = row;
      if (p.block_table) {
        batch = p.block_table[b * p.block_table_stride + row / p.page_size];
        row %= p.page_size;
      }
      for (int h = 0; h < p.num_heads_kv; ++h) {
        const int64_t k = at(p.k_stride, b, t, h), k_to = at(p.k_cache_stride, batch, row, h);
        const int64_t v = at(p.v_stride, b, t, h), v_to = at(p.v_cache_stride, batch, row, h);
        for (int d = 0; d < p.head_dim; ++d) {
          float x = load(p.k, p.dtype, k + d);
          const int half = p.rotary_dim / 2;
          if (d < p.rotary_dim) {
            const int pair = p.rotary_interleaved ? d / 2 : d % half;
            const bool first = p.rotary_interleaved ? d % 2 == 0 : d < half;
            const int other = p.rotary_interleaved ? d ^ 1 : (d + half) % p.rotary_dim;
            const float y = load(p.k, p.dtype, k + other);
            const float c = load(p.rotary_cos, p.dtype, position * half + pair);
            const float s = load(p.rotary_sin, p.dtype, position * half + pair);
            x = first ? x * c - y * s : x * c + y * s;
          }
          store(p.k_cache, p.dtype, k_to + d, x);
        }
        for (int d = 0; d < p.head_dim_v; ++d) {
          store(p.v_cache, p.dtype, v_to + d, load(p.v, p.dtype, v + d));
        }
      }
    }
  }
}

const char* serve_fwd(const FwdParams& p) {
  if (p.dropout_p > 0) return "dropout is not faked";
  if (p.q_stride.row % 4 != 0) return "q rows must start on 16 bytes";
  return nullptr;
}
const char* serve_bwd(const BwdParams& p) { return serve_fwd(p.fwd); }
const char* only_strict(const FwdParams& p) { return p.strict ? nullptr : "serves strict calls"; }
void deadlock(const FwdParams&, cudaStream_t) { throw std::runtime_error("deadlock in block 3"); }

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16;

const FwdKernel kFwd[] = {
    {"fake_strict", 80, kF32, 128, 128, 64, 64, 128, only_strict, fwd_workspace, deadlock},
    {"fake_fwd", 80, kF32, 128, 128, 64, 64, 128, serve_fwd, fwd_workspace, launch_fwd},
    {"fake_fwd_bf16", 80, kBf16, 128, 128, 64, 64, 128, serve_fwd, fwd_workspace, launch_fwd}};
const FwdKernel kDecode[] = {
    {"fake_decode", 80, kF32, 128, 128, 4, 16, 128, serve_fwd, fwd_workspace, launch_decode}};
const BwdKernel kBwd[] = {
    {"fake_bwd", 80, kF32, 128, 128, 64, 64, 128, serve_bwd, bwd_workspace, launch_bwd}};

}  // namespace

extern "C" __attribute__((visibility("default"))) const KernelTable* flash_cuda_kernel_table() {
  static const KernelTable table = [] {
    KernelTable t;
    t.fwd = kFwd;
    t.num_fwd = 3;
    t.decode = kDecode;
    t.num_decode = 1;
    t.bwd = kBwd;
    t.num_bwd = 1;
    t.combine = combine;
    t.kv_append = kv_append;
    return t;
  }();
  return &table;
}
