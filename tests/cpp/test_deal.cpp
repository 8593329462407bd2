// Units of work dealt out to thread blocks.
#include "common/deal.h"

#include <vector>

#include "expect.h"

using namespace flash_cuda;

namespace {

void test_deal() {
  for (int shares : {1, 2, 5, 132, 264}) {
    for (int total = 0; total < 1200; total += total < 300 ? 1 : 37) {
      const Deal deal = Deal::make(total, shares);
      EXPECT(deal.begin(0) == 0 && deal.begin(shares) == total);
      for (int c = 0; c < shares; ++c) {
        const int count = deal.begin(c + 1) - deal.begin(c);
        EXPECT(count == deal.size_of(c));
        EXPECT(count == total / shares || count == ceil_div(total, shares));
        for (int u = deal.begin(c); u < deal.begin(c + 1); ++u) EXPECT(deal.owner(u) == c);
      }
    }
  }
  // In rounds: no share has units of two.
  for (int units : {1, 2, 31, 64, 500}) {
    for (int size : {1, 2, 33, 66}) {
      const Deal deal = Deal::make_rounds(units, size);
      for (int c = 0; c < 3 * size; ++c) {
        EXPECT(deal.begin(c) >= c / size * units && deal.begin(c + 1) <= (c / size + 1) * units);
        EXPECT(deal.begin(c + 1) == deal.begin(c) + deal.size_of(c));
        for (int u = deal.begin(c); u < deal.begin(c + 1); ++u) EXPECT(deal.owner(u) == c);
      }
      EXPECT(deal.begin(3 * size) == 3 * units);
    }
  }
  // The largest calls: units fill an int.
  const Deal most = Deal::make(0x7fffffff, 264);
  EXPECT(most.begin(264) == 0x7fffffff && most.owner(0x7ffffffe) == 263 && most.owner(0) == 0);
}

// A line of sequences of tiles, dealt out as decode_work.cuh does: every block of keys is in one
// share, and the pieces of a tile lie in the shares that its first one names.
void test_line(unsigned seed) {
  const auto draw = [&](int n) {
    return static_cast<int>((seed = seed * 1664525u + 1013904223u) >> 8) % n;
  };
  struct Sequence {
    int tiles, blocks, total;
  };
  const int overhead = draw(4), shares = 1 + draw(30);
  std::vector<Sequence> line(1 + draw(9));
  int total = 0;
  for (Sequence& s : line) {
    s.tiles = draw(6);
    s.blocks = 1 + draw(draw(2) == 0 ? 3 : 40);
    total += s.total = s.tiles * (overhead + s.blocks);
  }
  if (total == 0) return;
  const Deal deal = Deal::make(total, shares);
  struct Tile {
    int seen = 0, next_share = -1, end_share = -1;
  };
  std::vector<std::vector<Tile>> tiles;
  for (const Sequence& s : line) tiles.emplace_back(s.tiles);
  for (int c = 0; c < shares; ++c) {
    size_t sequence = 0;
    int at = deal.begin(c);
    for (int unit = at; unit < deal.begin(c + 1);) {
      for (; at >= line[sequence].total; ++sequence) at -= line[sequence].total;
      const Sequence& s = line[sequence];
      const TileRun run = TileRun::make(at, deal.begin(c + 1) - unit, overhead, s.blocks);
      EXPECT(run.units > 0);
      const int first_unit = unit + run.first_unit;
      unit += run.units;
      at += run.units;
      if (run.last <= 0) continue;
      Tile& tile = tiles[sequence][run.tile];
      EXPECT(run.first == tile.seen && run.last > run.first && run.last <= s.blocks);
      tile.seen = run.last;
      if (run.first == 0) {
        tile.end_share = deal.owner(first_unit + s.blocks - 1) + 1;
      } else {
        EXPECT(c == tile.next_share);
      }
      EXPECT(c < tile.end_share && (run.last == s.blocks) == (c + 1 == tile.end_share));
      tile.next_share = c + 1;
    }
  }
  for (size_t i = 0; i < line.size(); ++i) {
    for (const Tile& tile : tiles[i]) EXPECT(tile.seen == line[i].blocks);
  }
}

void test_shares() {
  EXPECT(best_shares(4, 256, 264) == 256);       // no more than units
  EXPECT(best_shares(4, 8192, 264) == 264);      // 66 to a tile
  EXPECT(best_shares(64, 32768, 264) == 256);    // 4 to a tile, none cut elsewhere
  EXPECT(best_shares(1024, 32768, 264) == 256);  // 4 whole tiles each
  EXPECT(best_shares(200, 20000, 264) == 264);   // 200 would leave too much idle
  EXPECT(best_shares(0, 0, 264) == 1);
  EXPECT(round_parts(1) == 1 && round_parts(16) == 16 && round_parts(33) == 32);
  EXPECT(round_parts(15) == 15 && round_parts(44) == 44 && round_parts(132) == 128);
  for (int64_t tiles : {1, 3, 4, 7, 100, 131, 263, 264, 265, 5000}) {
    for (int64_t blocks : {1, 2, 17, 512}) {
      const int shares = best_shares(tiles, tiles * blocks, 264);
      const int64_t most = min_of(tiles * blocks, int64_t{264});
      EXPECT(shares <= most && 24 * (most - shares) <= most);
    }
  }
}

}  // namespace

int main() {
  test_deal();
  for (unsigned seed = 0; seed < 5000; ++seed) test_line(seed);
  test_shares();
}
