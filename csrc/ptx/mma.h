// Warp-level matrix multiply (PTX ISA: mma.sync.m16n8k16, 16-bit operands, fp32 accumulation).
//
// With g = lane / 4 and c = lane % 4: a0..a3 hold rows {g, g + 8} x columns {2c, 2c + 8} (pairs),
// b0, b1 hold k {2c, 2c + 8} (pairs) of column g, and d0..d3 hold row g columns 2c, 2c + 1, then
// row g + 8.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace flash_cuda::ptx {

template <DType kDType>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  static_assert(kDType == DType::kFloat16 || kDType == DType::kBFloat16);
  if constexpr (kDType == DType::kFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace flash_cuda::ptx
