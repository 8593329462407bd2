// Where one sequence of the batch lies, for dense, packed, cached and paged tensors.
#pragma once

#include "common/host_device.h"
#include "common/params.h"

namespace flash_cuda {

struct SeqInfo {
  int q_row0;          // first row in the packed tensor, 0 when dense
  int kv_row0;         // first key row, packed start and left padding included
  int seqlen_q;        // rows that count
  int seqlen_q_slot;   // rows to write: >= seqlen_q; the rest gets out 0, lse -inf
  int seqlen_kv;       // keys that count
  int seqlen_kv_slot;  // keys whose gradient is to be written: >= kv_row0 offset + seqlen_kv
  int kv_batch;        // batch index into k and v (dense or cache)
  int q_batch;         // batch index into q and out, 0 when packed
};

FLASH_CUDA_HOST_DEVICE SeqInfo seq_info(const FwdParams& p, int b) {
  SeqInfo s{};
  if (p.cu_seqlens_q) {
    s.q_row0 = p.cu_seqlens_q[b];
    s.seqlen_q_slot = max_of(p.cu_seqlens_q[b + 1] - s.q_row0, 0);
    s.q_batch = 0;
  } else {
    s.q_row0 = 0;
    s.seqlen_q_slot = p.seqlen_q;
    s.q_batch = b;
  }
  s.seqlen_q = p.seqused_q ? min_of(max_of(p.seqused_q[b], 0), s.seqlen_q_slot) : s.seqlen_q_slot;

  const int leftpad = p.leftpad_k ? p.leftpad_k[b] : 0;
  if (p.cu_seqlens_k) {
    s.kv_row0 = p.cu_seqlens_k[b];
    s.seqlen_kv_slot = max_of(p.cu_seqlens_k[b + 1] - s.kv_row0, 0);
    s.kv_batch = 0;
  } else {
    s.kv_row0 = 0;
    s.seqlen_kv_slot = p.seqlen_kv;
    s.kv_batch = p.cache_batch_idx ? p.cache_batch_idx[b] : b;
  }
  const int used =
      p.seqused_k ? min_of(max_of(p.seqused_k[b], 0), s.seqlen_kv_slot) : s.seqlen_kv_slot;
  s.kv_row0 += leftpad;
  s.seqlen_kv = max_of(used - leftpad, 0);
  return s;
}

}  // namespace flash_cuda
