// Mask and its block ranges against the definition, for every mask on small shapes.
#include "common/mask.h"
#include "expect.h"

using namespace flash_cuda;

namespace {

// The definition: query i stands at key position i + offset.
bool sees(const Mask& m, int i, int j) {
  const int pos = i + m.offset;
  if (j < pos - m.window_left || j > pos + m.window_right) return false;
  return m.chunk == 0 || floor_div(pos, m.chunk) == floor_div(j, m.chunk);
}

void check_intervals(const Mask& m) {
  for (int i = 0; i < m.seqlen_q; ++i) {
    for (int j = 0; j < m.seqlen_kv; ++j) {
      EXPECT((j >= m.kv_begin(i) && j < m.kv_end(i)) == sees(m, i, j));
      EXPECT((i >= m.q_begin(j) && i < m.q_end(j)) == sees(m, i, j));
    }
  }
}

// No pair is missed, no masked pair is taken for free, nothing outside the tensor is visited.
template <class Sees>
void check_range(const BlockRange& r, int first, int last, int length, int block, Sees sees_pair) {
  EXPECT(r.begin >= 0 && r.end <= ceil_div(length, block));
  for (int b = 0; b * block < length; ++b) {
    int seen = 0, pairs = 0;
    for (int x = first; x < last; ++x) {
      for (int y = b * block; y < (b + 1) * block; ++y) {
        ++pairs;
        seen += y < length && sees_pair(x, y);
      }
    }
    const bool visited = b >= r.begin && b < r.end;
    if (seen > 0) EXPECT(visited);
    if (visited && !r.is_masked(b)) EXPECT(seen == pairs);
  }
}

void check_blocks(const Mask& m, int block_q, int block_kv) {
  for (int q0 = 0; q0 < m.seqlen_q; q0 += block_q) {
    check_range(m.kv_blocks(q0, block_q, block_kv), q0, min_of(q0 + block_q, m.seqlen_q),
                m.seqlen_kv, block_kv, [&](int i, int j) { return sees(m, i, j); });
  }
  for (int kv0 = 0; kv0 < m.seqlen_kv; kv0 += block_kv) {
    check_range(m.q_blocks(kv0, block_kv, block_q), kv0, min_of(kv0 + block_kv, m.seqlen_kv),
                m.seqlen_q, block_q, [&](int j, int i) { return sees(m, i, j); });
  }
}

// Sums of positions and window ends stay inside an int at the largest lengths (run with UBSan).
void check_limits() {
  const int longest = 1 << 29;
  for (int seqlen_q : {1, longest}) {
    for (int seqlen_kv : {1, longest}) {
      for (int window : {0, kUnbounded}) {
        for (int chunk : {0, 7, kUnbounded}) {
          FwdParams p;
          p.window_left = p.window_right = window;
          p.attention_chunk = chunk;
          const Mask m = Mask::make(p, seqlen_q, seqlen_kv);
          for (int i : {0, seqlen_q - 1}) EXPECT(m.kv_end(i) <= seqlen_kv && m.kv_begin(i) >= 0);
          for (int j : {0, seqlen_kv - 1}) EXPECT(m.q_end(j) <= seqlen_q && m.q_begin(j) >= 0);
        }
      }
    }
  }
}

}  // namespace

int main() {
  for (int seqlen_q = 0; seqlen_q < 18; seqlen_q += 1 + seqlen_q / 6)
    for (int seqlen_kv = 0; seqlen_kv < 18; seqlen_kv += 1 + seqlen_kv / 6)
      for (int window_left : {kUnbounded, 0, 3, 9, 25})
        for (int window_right : {kUnbounded, 0, 2, 30})
          for (int chunk : {0, 1, 4, 7})
            for (bool top_left : {false, true}) {
              FwdParams p;
              p.window_left = window_left;
              p.window_right = window_right;
              p.attention_chunk = chunk;
              p.top_left = top_left;
              const Mask m = Mask::make(p, seqlen_q, seqlen_kv);
              check_intervals(m);
              check_blocks(m, 4, 8);
              check_blocks(m, 8, 4);
            }
  check_limits();
}
