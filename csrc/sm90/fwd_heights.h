// How high the tiles of a full call are: of how many warpgroups.
//
// A warpgroup without rows takes no part in a tile, so a tile may be of fewer than all. Which
// heights a head is cut into follows from how long each takes and how they fill the SMs.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace flash_cuda::sm90 {

// How long tiles take that have rows for all warpgroups, for one fewer, for one; beside one of two
// warpgroups with 128 keys a block.
struct TileTimes {
  double all, one_fewer, one;
};

// The first `tall` tiles of a head are of all warpgroups, the others of one fewer.
struct Heights {
  int tall;
  double time;  // of the whole call
};

// Rounds of long tiles, then short ones by whoever is free.
inline double time_of_tiles(int64_t many, double time, int64_t few, double short_time, int sms) {
  const int64_t rounds = many / sms, ahead = many % sms;
  const double start = double(rounds) * time;  // of all but those that are ahead by one tile
  if (few == 0) return ahead ? start + time : start;
  const auto done = [&](double until) {
    const auto tiles = [&](double t) { return t < 0 ? 0 : int64_t(t / short_time + 1e-9); };
    return (sms - ahead) * tiles(until) + ahead * tiles(until - time);
  };
  double until = ahead ? time : short_time;
  const double least = (double(few) * short_time + double(ahead) * time) / sms;
  if (least > until) until = double(int64_t(least / short_time)) * short_time;
  while (done(until) < few) until += short_time / 4;
  return start + until;
}

// Of heads with `rows` rows each; by_two: an even number of tiles for each.
template <int kWarpgroups>
Heights best_heights(int rows, int64_t heads, int sms, const TileTimes& times,
                     bool by_two = false) {
  constexpr int kFewest = 6;  // tiles of a head that may be low
  const int slices = ceil_div(rows, 64);
  Heights best{0, 1e300};
  for (int tall = slices / kWarpgroups; tall >= max_of(slices / kWarpgroups - kFewest, 0); --tall) {
    const int left = slices - tall * kWarpgroups;
    if (by_two && (tall + ceil_div(left, kWarpgroups - 1)) % 2) continue;
    // Where the last tile has still fewer, it counts as a part of one.
    const double last = left % (kWarpgroups - 1) ? times.one / times.one_fewer : 0;
    const double low = double(heads) * (left / (kWarpgroups - 1) + last);
    const double time =
        time_of_tiles(tall * heads, times.all, int64_t(std::ceil(low)), times.one_fewer, sms);
    if (time < best.time - 1e-9) best = {tall, time};
  }
  return best;
}

}  // namespace flash_cuda::sm90
