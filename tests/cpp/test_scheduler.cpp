// Schedules: every tile once, and places of packed blocks that never meet.
#include "common/scheduler.cuh"

#include <set>
#include <tuple>
#include <vector>

#include "expect.h"

using namespace flash_cuda;

namespace {

void test_dense() {
  for (int blocks : {1, 3, 8}) {
    for (int heads : {1, 5}) {
      for (int batch : {1, 4}) {
        for (int section : {1, 3, 7, 100}) {
          for (bool descending : {false, true}) {
            const DenseSchedule s{blocks, heads, batch, section, descending};
            std::set<std::tuple<int, int, int>> tiles;
            int previous = -1;
            for (int64_t i = 0; i < s.size(); ++i) {
              const WorkTile t = s.tile(static_cast<int>(i));
              EXPECT(t.valid && t.batch >= 0 && t.batch < batch && t.head >= 0 && t.head < heads);
              EXPECT(t.block >= 0 && t.block < blocks);
              EXPECT(tiles.insert({t.batch, t.head, t.block}).second);
              const bool all_in_one = section >= heads * batch;
              if (all_in_one && previous >= 0) {  // longest first
                EXPECT(descending ? t.block <= previous : t.block >= previous);
              }
              previous = t.block;
            }
            EXPECT(static_cast<int64_t>(tiles.size()) == s.size());
          }
        }
      }
    }
  }
}

void test_packed_places() {
  const std::vector<std::vector<int>> lengths = {
      {0}, {1}, {64}, {65, 0, 63, 1}, {0, 0, 0}, {1, 1, 1, 1, 1, 1}, {100, 28, 200, 3}, {127, 129}};
  for (int block_rows : {16, 64, 128}) {
    for (const auto& each : lengths) {
      for (int rest : {0, 1, 130}) {  // rows behind the last sequence
        const int batch = static_cast<int>(each.size());
        std::set<int> places;
        int row0 = 0, total = rest;
        for (int n : each) total += n;
        for (int b = 0; b <= batch; ++b) {
          const int rows = b < batch ? each[b] : rest;
          for (int block = 0; block < ceil_div(rows, block_rows); ++block) {
            const int place = packed_block_base(row0, b, block_rows) + block;
            EXPECT(place < packed_blocks(total, batch, block_rows));
            EXPECT(places.insert(place).second);
          }
          row0 += rows;
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_dense();
  test_packed_places();
}
