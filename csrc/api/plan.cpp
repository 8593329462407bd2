#include "api/plan.h"

#include "common/host_device.h"

namespace flash_cuda {

namespace {

// In units of one KV block of one tile. A block starts, fills its pipeline and ends at the price
// of about two; a part more is written once and read once by combine; combine is one more launch.
constexpr double kBlockOverhead = 2.0;
constexpr double kPartCost = 0.05;
constexpr double kCombineLaunch = 4.0;

// Rows of tiles that one row of q makes.
int64_t group_of(const SplitShape& s, bool pack_gqa) {
  return pack_gqa ? s.num_heads_q / s.num_heads_kv : 1;
}

}  // namespace

int64_t count_tiles(const SplitShape& s, bool pack_gqa) {
  const int64_t group = group_of(s, pack_gqa), block = s.block_q;
  const int64_t each = s.batch * ceil_div(s.seqlen_q * group, block);
  const int64_t together = ceil_div(s.total_q * group, block) + s.batch - 1;
  return s.num_heads_q / group * min_of(each, together);
}

bool plan_pack_gqa(const SplitShape& s) {
  return s.num_heads_q > s.num_heads_kv && count_tiles(s, true) < count_tiles(s, false);
}

bool beats_newer_kernel(int64_t split_tiles, int64_t newer_tiles, int64_t keys, int num_sms) {
  // Measured (docs/tuning.md), in the time that the newer kernel takes for a key of one wave: what
  // the split-KV kernels take for a key of one tile an SM, and for their start and merge.
  constexpr double kTile = 1.94, kFixed = 1800.0;
  const double length = static_cast<double>(keys);
  const double waves = static_cast<double>(ceil_div(newer_tiles, int64_t{num_sms}));
  const double tiles_an_sm = static_cast<double>(split_tiles) / num_sms;
  return kFixed + kTile * tiles_an_sm * length <= waves * length;
}

bool is_decode(const SplitShape& s, bool pack_gqa) {
  return s.seqlen_q * group_of(s, pack_gqa) <= s.block_q;
}

int plan_num_splits(const SplitShape& s, bool pack_gqa, int max_splits) {
  const int64_t tiles = count_tiles(s, pack_gqa);
  const int64_t kv_blocks = ceil_div(s.visible_kv, int64_t{s.block_kv});
  if (tiles <= 0 || kv_blocks <= 1 || s.num_sms <= 0) return 1;
  const int64_t most = min_of(kv_blocks, int64_t{max_splits});
  int best = 1;
  double best_time = 0.0;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t part = ceil_div(kv_blocks, splits);
    if (splits > 1 && ceil_div(kv_blocks, part) < splits) continue;  // would leave parts empty
    const int64_t waves = ceil_div(tiles * splits, int64_t{s.num_sms});
    double time = static_cast<double>(waves) * (static_cast<double>(part) + kBlockOverhead);
    if (splits > 1) time += kCombineLaunch + kPartCost * static_cast<double>(splits);
    if (splits == 1 || time < best_time) {
      best = static_cast<int>(splits);
      best_time = time;
    }
  }
  return best;
}

}  // namespace flash_cuda
