// Matrix operands in shared memory, as wgmma and tcgen05 describe them.
//
// PTX ISA, "Matrix descriptor" and "Strides": 16-byte chunks in rows of 16, 32, 64 or 128 bytes
// (no swizzle, or the swizzle of that width), eight rows to a core matrix.
#pragma once

#include "machine.h"

namespace px {

struct Operand {
  uint32_t start, leading, stride;  // bytes
  uint32_t chunks;                  // 16-byte chunks in a swizzled row: 1 (no swizzle), 2, 4, 8
  uint32_t version, base_offset;
  bool absolute_leading;
};

inline Operand decode_fields(uint64_t d) {
  Operand o{};
  o.start = uint32_t(d & 0x3fff) << 4;
  o.leading = uint32_t(d >> 16 & 0x3fff) << 4;
  o.stride = uint32_t(d >> 32 & 0x3fff) << 4;
  o.base_offset = uint32_t(d >> 49 & 7);
  return o;
}
inline Operand decode_wgmma(uint64_t d) {
  Operand o = decode_fields(d);
  uint32_t const mode = uint32_t(d >> 62);  // none, 128, 64, 32 bytes
  o.chunks = mode == 1 ? 8 : mode == 2 ? 4 : mode == 3 ? 2 : 1;
  return o;
}
inline Operand decode_tcgen05(uint64_t d) {
  Operand o = decode_fields(d);
  uint32_t const mode = uint32_t(d >> 61);
  o.version = uint32_t(d >> 46 & 7);
  o.absolute_leading = d >> 52 & 1;
  o.chunks = mode == 2 ? 8 : mode == 4 ? 4 : mode == 6 ? 2 : 1;
  return o;
}

// Shared address of the 16-byte chunk that holds row `row` (along M or N), depth `k`, for
// elements of `size` bytes. K-major chunks run along k, MN-major ones along the rows.
inline uint32_t chunk_address(Operand const& o, bool mn_major, uint32_t size, uint32_t row,
                              uint32_t k) {
  uint32_t offset;
  if (!mn_major) {
    uint32_t const chunk = k * size >> 4;
    offset = (row & 7) * (o.chunks * 16) + (row >> 3) * o.stride +
             chunk * (o.chunks > 1 ? 16u : o.leading);
  } else {
    uint32_t const chunk = row * size >> 4;
    if (o.chunks > 1)
      offset = chunk % o.chunks * 16 + chunk / o.chunks * o.leading + (k & 7) * (o.chunks * 16) +
               (k >> 3) * o.stride;
    else
      offset = chunk * o.stride + (k & 7) * 16 + (k >> 3) * o.leading;
  }
  uint32_t const a = o.start + offset;
  return a ^ ((a >> 7 & (o.chunks - 1)) << 4);
}

// Reads a rows x depth operand. Element (row, k) goes to out[row * pitch + k], or to
// out[k * pitch + row] if `by_depth`.
void gather_operand(Thread& t, int at, Cta& cta, Operand const& o, bool mn_major, Element e,
                    uint32_t size, uint32_t rows, uint32_t depth, float* out, uint32_t pitch,
                    bool by_depth, HbOperation const* ops, int num_ops);

inline void multiply_row(float* d, float const* a, float const* b, uint32_t depth, uint32_t n,
                         uint32_t pitch) {
  for (uint32_t k = 0; k < depth; ++k) {
    float const x = a[k];
    float const* q = b + k * pitch;
    for (uint32_t j = 0; j < n; ++j) d[j] += x * q[j];
  }
}

}  // namespace px
