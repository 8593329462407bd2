// KV blocks dealt out to thread blocks, each with a copy of dq: every contribution to a tile is in
// a copy that is stored to first and read in the end.
#include "common/kv_deal.h"

#include <set>
#include <vector>

#include "common/mask.h"
#include "expect.h"

using namespace flash_cuda;

namespace {

void test_deal() {
  for (int count : {1, 2, 3, 7, 16}) {
    const KvDeal deal{count};
    std::set<int> seen;
    for (int owner = 0; owner < count; ++owner) {
      int previous = -1;
      for (int round = 0; round < 9; ++round) {
        const int block = deal.block(round, owner);
        EXPECT(block > previous && block / count == round && deal.owner(block) == owner);
        EXPECT(previous < 0 || deal.next(previous) == block);
        for (int begin = previous + 1; begin <= block; ++begin) {
          EXPECT(deal.first_from(begin, owner) == block);
        }
        EXPECT(seen.insert(block).second);
        previous = block;
      }
    }
    // So many blocks in a row have one of everybody (bwd_postprocess.cuh).
    for (int begin = 0; begin < 6 * count; ++begin) {
      for (int owner = 0; owner < count; ++owner) {
        EXPECT(deal.first_from(begin, owner) < begin + 2 * count - 1);
      }
    }
    EXPECT(*seen.begin() == 0 && *seen.rbegin() == 9 * count - 1);
  }
}

// What the kernel does: tiles from the end of its previous block on are stored, others added to.
void check_copies(const Mask& mask, int count, int block_q, int block_kv) {
  const KvDeal deal{count};
  const int tiles = ceil_div(mask.seqlen_q, block_q), blocks = ceil_div(mask.seqlen_kv, block_kv);
  std::vector<std::vector<int>> written(count, std::vector<int>(tiles, 0));
  for (int owner = 0; owner < count; ++owner) {
    int first_new = 0;
    for (int block = deal.block(0, owner); block < blocks; block = deal.next(block)) {
      const BlockRange range = mask.q_blocks(block * block_kv, block_kv, block_q);
      for (int t = range.begin; t < range.end; ++t) {
        EXPECT((t >= first_new) == (written[owner][t] == 0));
        ++written[owner][t];
      }
      first_new = range.end;
    }
  }
  for (int t = 0; t < tiles; ++t) {
    const BlockRange range = mask.kv_blocks(t * block_q, block_q, block_kv);
    int sum = 0;
    for (int owner = 0; owner < count; ++owner) {
      const bool read = deal.first_from(range.begin, owner) < range.end;
      EXPECT(read == (written[owner][t] > 0));
      sum += written[owner][t];
    }
    EXPECT(sum == range.end - range.begin);
  }
}

void test_masks() {
  for (int seqlen_q : {0, 1, 5, 16, 37})
    for (int seqlen_kv : {1, 8, 29, 64})
      for (int left : {kUnbounded, 0, 3, 11})
        for (int right : {kUnbounded, 0, 2, 30})
          for (int chunk : {0, 1, 4, 7})
            for (bool top_left : {false, true}) {
              FwdParams p;
              p.window_left = left;
              p.window_right = right;
              p.attention_chunk = chunk;
              p.top_left = top_left;
              const Mask mask = Mask::make(p, seqlen_q, seqlen_kv);
              for (int count : {1, 2, 3, 5}) {
                check_copies(mask, count, 4, 8);
                check_copies(mask, count, 8, 4);
              }
            }
}

void test_count() {
  const double limit = 4e9;
  EXPECT(count_kv_owners(16, 128, 128, 132, 134e6, limit) == 8);  // 128 of 132 at a time
  EXPECT(count_kv_owners(64, 32, 128, 132, 134e6, limit) == 2);
  EXPECT(count_kv_owners(256, 8, 128, 132, 134e6, limit) == 1);
  EXPECT(count_kv_owners(1, 4, 128, 132, 1e6, limit) == 4);     // no more than blocks
  EXPECT(count_kv_owners(16, 128, 128, 132, 1e9, limit) == 4);  // no more than fit
  EXPECT(count_kv_owners(16, 128, 128, 132, 4.1e9, limit) == 0);
  EXPECT(count_kv_owners(0, 0, 128, 132, 0.0, limit) == 0);  // an empty call
  EXPECT(count_kv_owners(1 << 20, 1 << 20, 128, 132, 1.0, limit) == 1);
}

}  // namespace

int main() {
  test_deal();
  test_masks();
  test_count();
}
