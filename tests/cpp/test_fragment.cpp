// Accumulator layout of mma.sync m16n8: every element of a 16 x kWidth tile has one owner.
#include "common/fragment.cuh"

#include <set>
#include <utility>

#include "expect.h"

using namespace flash_cuda;

namespace {

template <int kWidth>
void test_owners() {
  using Fragment = MmaFragment<kWidth>;
  std::set<std::pair<int, int>> owned;
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < Fragment::kRows; ++r) {
      for (int c = 0; c < Fragment::kCols; ++c) {
        const int row = Fragment::row(lane, r), col = Fragment::col(lane, c);
        EXPECT(row >= 0 && row < 16 && col >= 0 && col < kWidth);
        EXPECT(owned.insert({row, col}).second);
      }
    }
  }
  EXPECT(owned.size() == 16 * kWidth);
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16": registers c0, c1 hold row lane / 4, columns
// 2 * (lane % 4) and the next; c2, c3 the same eight rows below.
void test_registers() {
  MmaFragment<16> f;
  for (int t = 0; t < 2; ++t) {
    for (int i = 0; i < 4; ++i) f.acc[t][i] = static_cast<float>(4 * t + i);
  }
  const int lane = 13;
  for (int r = 0; r < 2; ++r) {
    for (int c = 0; c < 4; ++c) {
      const int reg = static_cast<int>(f.at(r, c));
      EXPECT(f.row(lane, r) == lane / 4 + (reg % 4 >= 2 ? 8 : 0));
      EXPECT(f.col(lane, c) == 8 * (reg / 4) + 2 * (lane % 4) + reg % 2);
    }
  }
  f.clear();
  EXPECT(f.at(1, 3) == 0.0f);
}

}  // namespace

int main() {
  test_owners<8>();
  test_owners<64>();
  test_owners<128>();
  test_registers();
}
