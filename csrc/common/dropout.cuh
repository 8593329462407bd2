// The dropout mask: Philox4x32-10, keyed by the seed and counted by the place of the score.
//
// A word depends on (seed, offset, batch, head, row, column) alone, so forward, backward and every
// tiling draw the same mask, and a CUDA graph draws a new one when the seed in memory changes.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"
#include "common/params.h"

namespace flash_cuda {

struct PhiloxWords {
  uint32_t word[4];
};

FLASH_CUDA_HOST_DEVICE uint32_t mul_hi32(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
#endif
}

// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
FLASH_CUDA_HOST_DEVICE PhiloxWords philox4x32_10(uint32_t k0, uint32_t k1, uint32_t c0, uint32_t c1,
                                                 uint32_t c2, uint32_t c3) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint32_t hi0 = mul_hi32(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
    const uint32_t hi1 = mul_hi32(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

struct Dropout {
  uint32_t seed_lo, seed_hi, offset_lo, head;  // head: batch * num_heads_q + head
  uint32_t threshold;                          // a word under it drops its score
  float keep_scale;                            // 1 / (1 - p)

  // threshold = round(p * 2^32), computed in double on both sides of a comparison.
  FLASH_CUDA_HOST_DEVICE static uint32_t threshold_of(float dropout_p) {
    return static_cast<uint32_t>(static_cast<double>(dropout_p) * 4294967296.0 + 0.5);
  }

  FLASH_CUDA_HOST_DEVICE static Dropout make(const FwdParams& p, int batch, int head_q) {
    Dropout d{};
    const uint64_t seed = static_cast<uint64_t>(p.rng_state[0]);
    d.seed_lo = static_cast<uint32_t>(seed);
    d.seed_hi = static_cast<uint32_t>(seed >> 32);
    d.offset_lo = static_cast<uint32_t>(static_cast<uint64_t>(p.rng_state[1]));
    d.head = static_cast<uint32_t>(batch * p.num_heads_q + head_q);
    d.threshold = threshold_of(p.dropout_p);
    d.keep_scale = 1.0f / (1.0f - p.dropout_p);
    return d;
  }

  // The four words of the columns [4 * quad, 4 * quad + 4) of a row.
  FLASH_CUDA_HOST_DEVICE PhiloxWords words(int row, int quad) const {
    return philox4x32_10(seed_lo, seed_hi, static_cast<uint32_t>(quad), static_cast<uint32_t>(row),
                         head, offset_lo);
  }
  FLASH_CUDA_HOST_DEVICE bool keep(int row, int col) const {
    return words(row, col / 4).word[col % 4] >= threshold;
  }
};

}  // namespace flash_cuda
