// Swizzled shared-memory tiles: no two elements share a place, and no access of a warp that the
// kernels make meets a bank conflict.
#include "common/swizzle.cuh"

#include <set>
#include <vector>

#include "common/fragment.cuh"
#include "expect.h"

using namespace flash_cuda;

namespace {

// Passes that the banks need beyond one, for accesses of `bytes` by each lane. The hardware
// serves 128 bytes at a time: 8 lanes of 16 bytes, 32 lanes of 4.
int conflicts(const std::vector<uint32_t>& addresses, int bytes) {
  const size_t together = 128 / bytes;
  int extra = 0;
  for (size_t first = 0; first < addresses.size(); first += together) {
    std::vector<std::set<uint32_t>> words(32);
    for (size_t i = first; i < first + together; ++i) {
      for (int b = 0; b < bytes; b += 4) {
        const uint32_t word = (addresses[i] + b) / 4;
        words[word % 32].insert(word);
      }
    }
    size_t passes = 1;
    for (const auto& bank : words) passes = bank.size() > passes ? bank.size() : passes;
    extra += static_cast<int>(passes) - 1;
  }
  return extra;
}

template <int kWidth>
void test_places() {
  using Tile = SwizzledTile<kWidth>;
  std::set<uint32_t> seen;
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < kWidth; ++col) {
      const uint32_t at = Tile::element(row, col);
      EXPECT(at / Tile::kRowBytes == static_cast<uint32_t>(row));
      EXPECT(seen.insert(at).second);
      if (col % 8 != 0) EXPECT(at == Tile::element(row, col - 1) + 2);
    }
  }
}

template <int kWidth>
void test_ldmatrix() {
  using Tile = SwizzledTile<kWidth>;
  for (int row16 = 0; row16 < 4; ++row16) {
    for (int col16 = 0; col16 < kWidth / 16; ++col16) {
      std::vector<uint32_t> addresses, crossed;
      for (int lane = 0; lane < 32; ++lane) {
        const uint32_t at = Tile::block16(Tile::lane_offset(lane), row16, col16);
        EXPECT(at == Tile::element(16 * row16 + lane % 16, 16 * col16 + lane / 16 * 8));
        addresses.push_back(at);
        const int matrix = lane / 8;  // the second and the third change places
        crossed.push_back(Tile::block16(Tile::lane_offset_crossed(lane), row16, col16));
        EXPECT(crossed.back() ==
               Tile::element(16 * row16 + matrix / 2 * 8 + lane % 8, 16 * col16 + matrix % 2 * 8));
      }
      EXPECT(conflicts(addresses, 16) == 0);
      EXPECT(conflicts(crossed, 16) == 0);
    }
  }
}

// A warp copies consecutive chunks of consecutive rows.
template <int kWidth>
void test_copies() {
  using Tile = SwizzledTile<kWidth>;
  for (int first = 0; first < 16 * Tile::kChunks; first += 32) {
    std::vector<uint32_t> addresses;
    for (int i = first; i < first + 32; ++i) {
      addresses.push_back(Tile::offset(i / Tile::kChunks, i % Tile::kChunks));
    }
    EXPECT(conflicts(addresses, 16) == 0);
  }
}

template <int kWidth>
void test_fragment_stores() {
  using Tile = SwizzledTile<kWidth>;
  using Fragment = MmaFragment<kWidth>;
  for (int r = 0; r < Fragment::kRows; ++r) {
    for (int c = 0; c < Fragment::kCols; c += 2) {
      std::vector<uint32_t> addresses;
      for (int lane = 0; lane < 32; ++lane) {
        addresses.push_back(Tile::element(Fragment::row(lane, r), Fragment::col(lane, c)));
      }
      EXPECT(conflicts(addresses, 4) == 0);
    }
  }
}

template <int kWidth>
void test_width() {
  test_places<kWidth>();
  test_ldmatrix<kWidth>();
  test_copies<kWidth>();
  test_fragment_stores<kWidth>();
}

// The counter itself: rows of 128 bytes without a permutation collide.
void test_counter() {
  std::vector<uint32_t> column;
  for (uint32_t row = 0; row < 8; ++row) column.push_back(row * 128);
  EXPECT(conflicts(column, 16) == 7);
}

}  // namespace

int main() {
  test_counter();
  test_width<32>();
  test_width<64>();
  test_width<96>();
  test_width<128>();
  test_width<192>();
  test_width<256>();
}
