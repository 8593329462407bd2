// How the work of a forward call is cut: GQA packing and split-KV. Pure functions of shapes, so
// that a CUDA graph can be replayed with other lengths and the same call always does the same.
#pragma once

#include <cstdint>

namespace flash_cuda {

struct SplitShape {
  int64_t batch = 0, num_heads_q = 0, num_heads_kv = 0;
  int64_t seqlen_q = 0;    // rows of the longest sequence, or of the average one if unknown
  int64_t total_q = 0;     // rows of all sequences
  int64_t visible_kv = 0;  // keys that a tile of queries may see at most
  int block_q = 64, block_kv = 64;
  int num_sms = 0;
};

// The query heads of a KV head share tiles where that saves tiles.
bool plan_pack_gqa(const SplitShape& shape);

// Tiles of queries in the whole call, at most.
int64_t count_tiles(const SplitShape& shape, bool pack_gqa);

// Parts of the KV range for the shortest time: waves of blocks times the length of a part, plus
// what writing and merging the partials costs.
int plan_num_splits(const SplitShape& shape, bool pack_gqa, int max_splits);

// Whether the split-KV kernels are done before a newer kernel that works on one tile an SM, where
// both are bound by arithmetic (a decoding step is not). The numbers of tiles of either, each
// against `keys` keys.
bool beats_newer_kernel(int64_t split_tiles, int64_t newer_tiles, int64_t keys, int num_sms);

// True for the few rows of a decoding step, which one tile of the split-KV kernel holds.
bool is_decode(const SplitShape& shape, bool pack_gqa);

}  // namespace flash_cuda
