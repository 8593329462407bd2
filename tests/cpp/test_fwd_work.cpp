// The order of the forward's tiles: every tile once, those that are held back behind all others.
#include "common/fwd_work.cuh"

#include <set>
#include <utility>

#include "expect.h"

using namespace flash_cuda;

namespace {

void test_places(int pairs, int q_blocks, int section, int joined_from, int held_back) {
  std::set<std::pair<int, int>> tiles;
  const int walked = pairs * (q_blocks - held_back);
  int previous = q_blocks;
  for (int i = 0; i < pairs * q_blocks; ++i) {
    const TilePlace at = TilePlace::find(i, pairs, q_blocks, section, joined_from, held_back);
    EXPECT(at.q_block >= 0 && at.q_block < q_blocks && at.pair >= 0 && at.pair < pairs);
    EXPECT(tiles.insert({at.q_block, at.pair}).second);
    EXPECT((at.q_block < held_back) == (i >= walked));
    if (i > walked) EXPECT(at.q_block <= previous);
    if (i < walked && joined_from == 0) EXPECT(at.q_block <= previous);
    previous = at.q_block;
  }
}

}  // namespace

int main() {
  for (int pairs : {1, 2, 7, 16}) {
    for (int q_blocks : {1, 4, 11}) {
      for (int section : {1, 3, 100}) {
        for (int sections : {0, 1, 2}) {
          for (int held_back : {0, 1, q_blocks / 4, q_blocks}) {
            test_places(pairs, q_blocks, section,
                        min_of(section * sections, pairs / section * section), held_back);
            test_places(pairs, q_blocks, section, kUnbounded, held_back);
          }
        }
      }
    }
  }
}
