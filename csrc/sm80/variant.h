// Which variant of a kernel a call needs.
#pragma once

#include "common/params.h"
#include "sm80/fwd_tile.h"

namespace flash_cuda::sm80 {

// Heads whose keys and values (queries and gradients) share this much L2 are worked on together.
constexpr double kSectionBytes = 24e6;

// 16-byte copies need a 16-byte aligned start of every row.
inline bool is_unaligned(const void* ptr, const Stride& s) {
  return reinterpret_cast<uintptr_t>(ptr) % 16 != 0 || s.batch % 8 != 0 || s.row % 8 != 0 ||
         s.head % 8 != 0;
}
inline bool is_unaligned(const FwdParams& p) {
  return is_unaligned(p.q, p.q_stride) || is_unaligned(p.k, p.k_stride) ||
         is_unaligned(p.v, p.v_stride);
}
inline bool is_unaligned(const BwdParams& p) {
  return is_unaligned(p.fwd) || is_unaligned(p.dout, p.dout_stride) ||
         is_unaligned(p.fwd.out, p.out_stride);
}

inline bool is_plain(const FwdParams& p) {
  return p.softmax_scale > 0.0f && p.softcap == 0.0f && !p.alibi_slopes && !p.bias && !p.sink &&
         p.dropout_p == 0.0f && !p.block_table && !is_unaligned(p);
}
// A sink acts on the main loop through lse alone, and so does a gradient of lse through row_dot.
inline bool is_plain(const BwdParams& p) {
  FwdParams f = p.fwd;
  f.sink = nullptr;
  constexpr int kAll = kWantDq | kWantDk | kWantDv;
  return is_plain(f) && !is_unaligned(p) && (p.wanted & kAll) == kAll;
}

}  // namespace flash_cuda::sm80
