// Which keys a query sees, and which blocks of keys (or queries) a tile has to visit.
//
// Every mask here is an interval of keys for a query and an interval of queries for a key, so
// causal, window, chunk and ragged ends are data and one main loop serves them all.
#pragma once

#include "common/host_device.h"
#include "common/params.h"

namespace flash_cuda {

// A tile visits the blocks [begin, end); those in [full_begin, full_end) need no masking.
struct BlockRange {
  int begin, end, full_begin, full_end;
  FLASH_CUDA_HOST_DEVICE bool is_masked(int block) const {
    return block < full_begin || block >= full_end;
  }
};

struct Mask {
  int seqlen_q, seqlen_kv, window_left, window_right;
  int chunk;   // attention_chunk, 0: none
  int offset;  // query q stands at key position q + offset

  FLASH_CUDA_HOST_DEVICE static Mask make(const FwdParams& p, int seqlen_q, int seqlen_kv) {
    return {seqlen_q,       seqlen_kv,         p.window_left,
            p.window_right, p.attention_chunk, p.top_left ? 0 : seqlen_kv - seqlen_q};
  }

  // Query q sees the keys [kv_begin(q), kv_end(q)); none where end <= begin.
  FLASH_CUDA_HOST_DEVICE int kv_begin(int q) const {
    const int pos = q + offset;
    int begin = max_of(0, pos - window_left);
    if (chunk > 0) begin = max_of(begin, floor_div(pos, chunk) * chunk);
    return begin;
  }
  FLASH_CUDA_HOST_DEVICE int kv_end(int q) const {
    const int pos = q + offset;
    int end = min_of(seqlen_kv, pos + 1 + window_right);
    if (chunk > 0) end = min_of(end, (floor_div(pos, chunk) + 1) * chunk);
    return end;
  }

  // Key kv is seen by the queries [q_begin(kv), q_end(kv)).
  FLASH_CUDA_HOST_DEVICE int q_begin(int kv) const {
    int begin = max_of(0, kv - window_right - offset);
    if (chunk > 0) begin = max_of(begin, floor_div(kv, chunk) * chunk - offset);
    return begin;
  }
  FLASH_CUDA_HOST_DEVICE int q_end(int kv) const {
    int end = min_of(seqlen_q, kv + window_left - offset + 1);
    if (chunk > 0) end = min_of(end, (floor_div(kv, chunk) + 1) * chunk - offset);
    return end;
  }

  // The KV blocks for the query rows [q0, q0 + block_q) (rows past seqlen_q do not count).
  // begin and end of a row are monotone in q, so the first and the last row decide.
  FLASH_CUDA_HOST_DEVICE BlockRange kv_blocks(int q0, int block_q, int block_kv) const {
    return blocks(
        q0, min_of(q0 + block_q, seqlen_q) - 1, block_kv, [this](int q) { return kv_begin(q); },
        [this](int q) { return kv_end(q); });
  }
  // The Q blocks for the keys [kv0, kv0 + block_kv). Ragged rows of the last Q block are not
  // counted as full only if the block is partial.
  FLASH_CUDA_HOST_DEVICE BlockRange q_blocks(int kv0, int block_kv, int block_q) const {
    return blocks(
        kv0, min_of(kv0 + block_kv, seqlen_kv) - 1, block_q, [this](int kv) { return q_begin(kv); },
        [this](int kv) { return q_end(kv); });
  }

 private:
  template <class Begin, class End>
  FLASH_CUDA_HOST_DEVICE static BlockRange blocks(int first, int last, int block, Begin begin_of,
                                                  End end_of) {
    if (last < first) return {0, 0, 0, 0};
    const int begin = begin_of(first), end = end_of(last);
    if (end <= begin) return {0, 0, 0, 0};
    // Seen by every row of the tile: from the last row's begin to the first row's end.
    const int full_begin = ceil_div(max_of(begin_of(last), 0), block);
    const int full_end = max_of(end_of(first), 0) / block;
    BlockRange r{begin / block, ceil_div(end, block), full_begin, full_end};
    if (r.full_end <= r.full_begin) r.full_begin = r.full_end = r.begin;
    return r;
  }
};

}  // namespace flash_cuda
