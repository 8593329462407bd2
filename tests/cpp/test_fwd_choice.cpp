// Which tile serves a call on Hopper: what kernels rely on holds for every shape and device, also
// for shapes at the limits (this is compiled so that an int that overflows is a failure).
#include "sm90/fwd_choice.h"

#include <random>

#include "expect.h"

using namespace flash_cuda;
using namespace flash_cuda::sm90;

namespace {

std::mt19937 random_numbers(1);
template <class T>
T pick(std::initializer_list<T> values) {
  return values.begin()[random_numbers() % values.size()];
}
int around(int x) { return max_of(1, x + pick({0, 0, 1, -1, 63, -63, 65})); }

FwdParams draw() {
  FwdParams p;
  p.num_sms = pick({1, 2, 3, 7, 16, 26, 60, 78, 114, 132, 148});
  p.softmax_scale = 0.1f;
  p.seqlen_q = around(pick({1, 64, 128, 192, 384, 1000, 4096, 30000, 1 << 20, 1 << 28}));
  p.seqlen_kv = around(pick({1, 64, 500, 1024, 3000, 4096, 8192, 30000, 1 << 20, 1 << 28}));
  p.num_heads_kv = pick({1, 2, 3, 5, 8, 1000});
  p.num_heads_q = p.num_heads_kv * pick({1, 2, 3, 4, 5, 8, 100});
  p.batch = pick({1, 1, 2, 3, 7, 64, 1000, 1 << 20});
  // Rows are at most 2^29 (tma_refuse.h); heads of so many would not fit into memory.
  while (int64_t(p.batch) * p.seqlen_q > 1 << 29) p.batch = (p.batch + 1) / 2;
  while (int64_t(p.batch) * p.seqlen_kv > 1 << 29) p.batch = (p.batch + 1) / 2;
  while (int64_t(p.batch) * p.num_heads_q * ceil_div(p.seqlen_q, 64) > 1 << 30) {
    p.num_heads_q = p.num_heads_kv = 1;
    p.batch = (p.batch + 1) / 2;
  }
  p.total_q = int64_t(p.batch) * p.seqlen_q;
  p.total_kv = int64_t(p.batch) * p.seqlen_kv;
  if (pick({0, 1})) p.window_right = pick({0, 0, 5, 300, p.seqlen_kv, kUnbounded - 1});
  if (pick({0, 0, 1})) p.window_left = pick({0, 5, 300, 1023, p.seqlen_kv, kUnbounded - 1});
  p.top_left = pick({0, 0, 1});
  p.attention_chunk = pick({0, 0, 0, 0, 100});
  return p;
}

// Tiles of a head, as the launcher counts them.
template <class Tile>
int tiles_of_head(const FwdParams& p, int tall_tiles) {
  const int q_blocks = ceil_div(p.seqlen_q, Tile::kBlockQ);
  if (tall_tiles >= q_blocks) return q_blocks;
  return tall_tiles + ceil_div(p.seqlen_q - tall_tiles * Tile::kBlockQ, Tile::kBlockQ - 64);
}

template <int kHeadDim, int kHeadDimV>
void test_choice(const FwdParams& p, int (&served)[3]) {
  using Variants = FwdVariants<kHeadDim, kHeadDimV>;
  const TailPlan tail = tail_plan<Variants>(p);
  EXPECT(tail.from >= 0 && tail.shares <= p.num_sms);
  with_tile<Variants>(p, [&](auto type, int tall_tiles) {
    using Tile = typename decltype(type)::Type;
    const int q_blocks = tiles_of_head<Tile>(p, tall_tiles);
    const int64_t tiles = int64_t(q_blocks) * p.batch * p.num_heads_q;
    if (Tile::has(kDense)) {
      // Every row sees a key.
      const Mask mask = Mask::make(p, p.seqlen_q, p.seqlen_kv);
      for (const int row : {0, p.seqlen_q / 2, p.seqlen_q - 1}) {
        EXPECT(mask.kv_begin(row) < mask.kv_end(row));
      }
      EXPECT(p.attention_chunk == 0);
    }
    if (tall_tiles < kUnbounded) {
      // Only of a full call, and a tile of two warpgroups at least begins before the last row.
      EXPECT(!has_diagonal(p) && Tile::kShiftsRows && tall_tiles >= 0);
      const int low = q_blocks - tall_tiles, low_rows = Tile::kBlockQ - 64;
      EXPECT(tall_tiles * Tile::kBlockQ + low * low_rows >= p.seqlen_q || low <= 0);
      EXPECT(low <= 0 || tall_tiles * Tile::kBlockQ + (low - 1) * low_rows < p.seqlen_q);
    }
    if (Tile::has(kPair)) {
      EXPECT(pairs_heads(p) || q_blocks % 2 == 0);
      EXPECT(p.num_sms >= 2 && tiles % 2 == 0);
      ++served[0];
    }
    EXPECT(Tile::has(kShareTail) == (tail.shares > 0));
    if (Tile::has(kShareTail)) {
      const int64_t shared = tiles - tail.from;
      EXPECT(shared > 0 && shared < p.num_sms && tail.from % p.num_sms == 0);
      EXPECT(shared * Tile::kWarpgroups <= kMostShared);
      // A share has a unit at least, and of no tile both ends and more.
      EXPECT(shared * tail.blocks >= tail.shares && shared * tail.blocks < INT32_MAX);
      ++served[1];
    }
    ++served[2];
  });
}

}  // namespace

int main() {
  int served[3] = {};
  for (int i = 0; i < 100000; ++i) {
    const FwdParams p = draw();
    switch (i % 6) {
      case 0:
        test_choice<64, 64>(p, served);
        break;
      case 1:
        test_choice<96, 96>(p, served);
        break;
      case 2:
        test_choice<128, 128>(p, served);
        break;
      case 3:
        test_choice<192, 128>(p, served);
        break;
      case 4:
        test_choice<192, 192>(p, served);
        break;
      default:
        test_choice<256, 256>(p, served);
    }
  }
  EXPECT(served[0] > 1000 && served[1] > 100 && served[2] == 100000);
}
