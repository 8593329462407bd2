// The plan of a forward call: split counts and GQA packing.
#include "api/plan.h"

#include "common/host_device.h"
#include "expect.h"

using namespace flash_cuda;

namespace {

SplitShape decode(int64_t batch, int64_t seqlen_kv) {
  SplitShape s;
  s.batch = batch;
  s.num_heads_q = 32;
  s.num_heads_kv = 4;
  s.seqlen_q = 1;
  s.total_q = batch;
  s.visible_kv = seqlen_kv;
  s.block_q = 16;
  s.block_kv = 64;
  s.num_sms = 132;
  return s;
}

double waves(const SplitShape& s, bool pack, int64_t splits) {
  return static_cast<double>(ceil_div(count_tiles(s, pack) * splits, int64_t{s.num_sms}));
}

void test_tiles() {
  SplitShape s = decode(3, 1000);
  EXPECT(count_tiles(s, true) == 3 * 4);
  EXPECT(count_tiles(s, false) == 3 * 32);
  EXPECT(plan_pack_gqa(s) && is_decode(s, true));
  s.num_heads_kv = 32;
  EXPECT(!plan_pack_gqa(s));
  // Rows that fill tiles alone gain nothing from packing.
  s = decode(1, 1000);
  s.seqlen_q = s.total_q = 64;
  EXPECT(!plan_pack_gqa(s) && !is_decode(s, false));
  // Packed: few long sequences cannot make more tiles than their rows.
  s = decode(8, 1000);
  s.seqlen_q = 100;
  s.total_q = 107;  // one of 100, seven of 1
  EXPECT(count_tiles(s, false) == 32 * (ceil_div(107, 16) + 7));
}

void test_splits() {
  for (int64_t batch : {1, 2, 7, 16, 64, 128, 1000}) {
    for (int64_t seqlen_kv : {0, 1, 64, 65, 500, 4096, 131072}) {
      const SplitShape s = decode(batch, seqlen_kv);
      const int splits = plan_num_splits(s, true, 128);
      const int64_t blocks = ceil_div(seqlen_kv, int64_t{64});
      EXPECT(splits >= 1 && splits <= 128 && splits <= max_of(blocks, int64_t{1}));
      if (blocks > 0) {  // no part is empty
        EXPECT(ceil_div(blocks, ceil_div(blocks, int64_t{splits})) == splits);
      }
    }
  }
  // A long cache and one sequence: the device is filled.
  const SplitShape one = decode(1, 131072);
  EXPECT(count_tiles(one, true) * plan_num_splits(one, true, 128) >= 120);
  // Enough tiles: nothing to gain.
  EXPECT(plan_num_splits(decode(1000, 4096), true, 128) == 1);
  // Few keys: merging costs more than it brings.
  EXPECT(plan_num_splits(decode(1, 65), true, 128) == 1);
  EXPECT(plan_num_splits(decode(1, 0), true, 128) == 1);
  // Just over a wave of tiles: splitting must not add waves in vain.
  const SplitShape tail = decode(34, 8192);
  const int splits = plan_num_splits(tail, true, 128);
  EXPECT(waves(tail, true, splits) / splits < waves(tail, true, 1));
  EXPECT(plan_num_splits(decode(1, 131072), true, 3) <= 3);
}

// As measured on an H200 with tiles of 128 rows of the newer kernel.
void test_newer_kernel() {
  const auto beats = [](int64_t batch, int64_t heads_kv, int64_t seqlen_q, int64_t keys) {
    SplitShape s = decode(batch, keys);
    s.num_heads_kv = heads_kv;
    s.block_q = 64;
    s.seqlen_q = seqlen_q;
    s.total_q = batch * seqlen_q;
    const int64_t newer = batch * 32 * ceil_div(seqlen_q, int64_t{128});
    return beats_newer_kernel(count_tiles(s, plan_pack_gqa(s)), newer, keys, s.num_sms);
  };
  EXPECT(beats(1, 4, 16, 2048) && !beats(1, 4, 64, 2048) && !beats(1, 4, 16, 1024));
  EXPECT(beats(1, 4, 64, 4096) && !beats(1, 4, 128, 4096));
  EXPECT(beats(1, 32, 64, 4096) && !beats(1, 32, 64, 2048));
  EXPECT(!beats(1, 4, 128, 8192) && beats(1, 4, 128, 32768) && !beats(1, 4, 256, 32768));
  EXPECT(beats(4, 8, 16, 4096) && !beats(4, 8, 64, 32768) && !beats(16, 4, 64, 4096));
}

}  // namespace

int main() {
  test_newer_kernel();
  test_tiles();
  test_splits();
}
