// Dealing units of work out to `shares` thread blocks, as evenly as whole units allow.
#pragma once

#include "common/host_device.h"

namespace flash_cuda {

// Share c has the units [begin(c), begin(c + 1)).
struct Deal {
  int each, more;   // the first `more` shares of a round have one unit more than `each`
  int units, size;  // of a round, in shares

  FLASH_CUDA_HOST_DEVICE static Deal make(int total, int shares) {
    return make_rounds(total, shares);
  }
  // Rounds of `size` shares have `units` units each: no share goes over the end of a round.
  FLASH_CUDA_HOST_DEVICE static Deal make_rounds(int units, int size) {
    const int each = units / size;
    return {each, units - each * size, units, size};
  }
  FLASH_CUDA_HOST_DEVICE int begin(int share) const {
    const int round = share / size, in_round = share - round * size;
    return round * units + in_round * each + min_of(in_round, more);
  }
  FLASH_CUDA_HOST_DEVICE int size_of(int share) const {
    return each + (share % size < more ? 1 : 0);
  }
  // The share that has a unit.
  FLASH_CUDA_HOST_DEVICE int owner(int unit) const {
    const int round = unit / units, in_round = unit - round * units, larger = more * (each + 1);
    return round * size +
           (in_round < larger ? in_round / (each + 1) : more + (in_round - larger) / each);
  }
};

// Tiles stand in a line, each with `overhead` units and then one for each of its `blocks`. What a
// run of `left` units that starts at `unit` has of the tile there.
struct TileRun {
  int tile, units;  // units of the run up to the end of the tile
  int first, last;  // blocks; none where last <= 0
  int first_unit;   // of block `first`, counted from the start of the run

  FLASH_CUDA_HOST_DEVICE static TileRun make(int unit, int left, int overhead, int blocks) {
    const int size = overhead + blocks, tile = unit / size, at = unit - tile * size;
    const int units = min_of(size - at, left);
    return {tile, units, max_of(at - overhead, 0), at + units - overhead, max_of(overhead - at, 0)};
  }
};

// How many shares of at most `slots` are best for tiles of equal size: as many as there are slots,
// but up to a 24th fewer where then no tile is cut, or all are in the same way.
inline int best_shares(int64_t tiles, int64_t units, int64_t slots) {
  const int64_t most = max_of(min_of(units, slots), int64_t{1});
  for (int64_t shares = most; shares > most - most / 24; --shares) {
    if (shares % max_of(tiles, int64_t{1}) == 0 || tiles % shares == 0) {
      return static_cast<int>(shares);
    }
  }
  return static_cast<int>(most);
}

// Parts of a tile: a multiple of 16, by which pieces are merged, where that is at most a 24th less.
inline int round_parts(int parts) {
  const int rounded = parts / 16 * 16;
  return 24 * (parts - rounded) <= parts ? max_of(rounded, 1) : parts;
}

}  // namespace flash_cuda
