// Rows of a 16-bit tensor from global to swizzled shared memory, and mma operands from there.
#pragma once

#include <type_traits>
#include <utility>

#include "common/fragment.cuh"
#include "common/swizzle.cuh"
#include "ptx/convert.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/smem_addr.h"

namespace flash_cuda::sm80 {

// Copies rows [0, kRows) of kWidth elements; row_address(i) gives the address of row i and is only
// asked for i < rows_valid. Other rows, and columns from `width` on, become zero.
template <int kRows, int kWidth, int kThreads, class RowAddress>
__device__ __forceinline__ void load_rows(uint32_t smem, int rows_valid, int width,
                                          const void* any_address, RowAddress row_address) {
  using Smem = SwizzledTile<kWidth>;
  constexpr int kLanes = Smem::kGroup;  // threads on one row, 16 bytes each
  constexpr int kRowStep = kThreads / kLanes;
  static_assert(kRows % kRowStep == 0 || kRows < kRowStep);
  const int first_row = threadIdx.x / kLanes, first_chunk = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < (kRows + kRowStep - 1) / kRowStep; ++i) {
    const int row = first_row + i * kRowStep;
    if (kRows < kRowStep && row >= kRows) break;
    const bool row_valid = row < rows_valid;
    const char* address = row_valid ? row_address(row) : static_cast<const char*>(any_address);
#pragma unroll
    for (int j = 0; j < Smem::kChunks / kLanes; ++j) {
      const int chunk = first_chunk + j * kLanes;
      const bool valid = row_valid && chunk * 8 < width;
      ptx::cp_async_16(smem + Smem::offset(row, chunk), valid ? address + chunk * 16 : any_address,
                       valid);
    }
  }
}

// The same where rows lie row_bytes apart; `first` is row 0 and only read where rows_valid > 0. A
// whole tile, which is nearly every one, costs two additions and a copy for 16 bytes.
template <int kRows, int kWidth, int kThreads>
__device__ __forceinline__ void load_tile(uint32_t smem, int rows_valid, int width,
                                          const void* any_address, const char* first,
                                          int64_t row_bytes) {
  using Smem = SwizzledTile<kWidth>;
  constexpr int kLanes = Smem::kGroup, kRowStep = kThreads / kLanes;
  constexpr bool kUniformSwizzle = kRowStep % 8 == 0;  // rows of a thread permute alike
  if (kUniformSwizzle && kRows % kRowStep == 0 && rows_valid >= kRows && width == kWidth) {
    const int row = threadIdx.x / kLanes, chunk = threadIdx.x % kLanes;
    const char* source = first + row * row_bytes + chunk * 16;
    const uint32_t target = smem + Smem::offset(row, chunk);
#pragma unroll
    for (int i = 0; i < kRows / kRowStep; ++i) {
#pragma unroll
      for (int j = 0; j < Smem::kChunks / kLanes; ++j) {
        ptx::cp_async_16(target + i * kRowStep * Smem::kRowBytes + j * Smem::kGroupBytes,
                         source + j * Smem::kGroupBytes);
      }
      source += kRowStep * row_bytes;
    }
    return;
  }
  load_rows<kRows, kWidth, kThreads>(smem, rows_valid, width, any_address,
                                     [=](int row) { return first + row * row_bytes; });
}

// The same for tensors whose rows are not 16-byte aligned: plain 2-byte loads, then one store.
template <int kRows, int kWidth, int kThreads, class RowAddress>
__device__ __noinline__ void load_rows_unaligned(uint32_t smem, int rows_valid, int width,
                                                 RowAddress row_address) {
  using Smem = SwizzledTile<kWidth>;
  for (int i = threadIdx.x; i < kRows * Smem::kChunks; i += kThreads) {
    const int row = i / Smem::kChunks, chunk = i % Smem::kChunks;
    uint32_t word[4] = {0, 0, 0, 0};
    if (row < rows_valid && chunk * 8 < width) {
      const uint16_t* source = reinterpret_cast<const uint16_t*>(row_address(row)) + chunk * 8;
      for (int k = 0; k < 4; ++k) word[k] = source[2 * k] | uint32_t{source[2 * k + 1]} << 16;
    }
    ptx::store_shared_16(smem + Smem::offset(row, chunk), word);
  }
}

// Calls body(integral_constant<int, i>) for every i. Unlike an unrolled loop, whose length the
// compiler may find too much, this never leaves an index of registers to run time.
template <class Body, int... kIndex>
__device__ __forceinline__ void for_each_index(std::integer_sequence<int, kIndex...>, Body body) {
  (body(std::integral_constant<int, kIndex>{}), ...);
}

struct Nothing {
  template <class K, class N>
  __device__ __forceinline__ void operator()(K, N) const {}
};

// acc += A B for one warp. A: kTilesM tiles of 16 rows, given as registers by load_a(k, a);
// B: kSteps x 16 deep, kWidthN wide, given in pairs of 8-column tiles by load_b(k, n, b). The
// operands of the next step are fetched before the products of this one. `beside(k, n)` follows the
// products of each step: other work of the warp that is to run beside them.
template <DType kDType, int kTilesM, int kWidthN, int kSteps, class LoadA, class LoadB,
          class Beside = Nothing>
__device__ __forceinline__ void warp_gemm(MmaFragment<kWidthN> (&acc)[kTilesM], LoadA load_a,
                                          LoadB load_b, Beside beside = {}) {
  constexpr int kPairsN = kWidthN / 16, kTotal = kSteps * kPairsN;
  uint32_t a[2][kTilesM][4], b[2][4];
  load_a(0, a[0]);
  load_b(0, 0, b[0]);
  for_each_index(std::make_integer_sequence<int, kTotal>{}, [&](auto index) {
    constexpr int step = decltype(index)::value, k = step / kPairsN, n = step % kPairsN;
    if constexpr (step + 1 < kTotal) {
      if constexpr (n + 1 == kPairsN) load_a(k + 1, a[(k + 1) % 2]);
      load_b((step + 1) / kPairsN, (step + 1) % kPairsN, b[(step + 1) % 2]);
    }
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      ptx::mma_m16n8k16<kDType>(acc[m].acc[2 * n], a[k % 2][m], b[step % 2][0], b[step % 2][1]);
      ptx::mma_m16n8k16<kDType>(acc[m].acc[2 * n + 1], a[k % 2][m], b[step % 2][2], b[step % 2][3]);
    }
    beside(std::integral_constant<int, k>{}, std::integral_constant<int, n>{});
  });
}

// B operand from rows that run along k (Q K^T), without moving a register: `lane_base` has
// lane_offset_crossed.
template <class Smem>
__device__ __forceinline__ void load_b_crossed(uint32_t (&b)[4], uint32_t lane_base, int k, int n) {
  ptx::ldmatrix_x4(b, Smem::block16(lane_base, n, k));
}
// A operand from rows that run along m, a transposed tile; also with lane_offset_crossed.
template <class Smem>
__device__ __forceinline__ void load_a_crossed(uint32_t (&a)[4], uint32_t lane_base, int m, int k) {
  ptx::ldmatrix_x4_trans(a, Smem::block16(lane_base, k, m));
}
// B operand from rows that run along k (Q K^T): tile n pairs share the addresses of an A operand.
template <class Smem>
__device__ __forceinline__ void load_b_rows_n(uint32_t (&b)[4], uint32_t lane_base, int k, int n) {
  uint32_t r[4];
  ptx::ldmatrix_x4(r, Smem::block16(lane_base, n, k));
  b[0] = r[0], b[1] = r[2], b[2] = r[1], b[3] = r[3];
}
// B operand from rows that run along n (P V).
template <class Smem>
__device__ __forceinline__ void load_b_rows_k(uint32_t (&b)[4], uint32_t lane_base, int k, int n) {
  ptx::ldmatrix_x4_trans(b, Smem::block16(lane_base, k, n));
}
// A operand from rows that run along k.
template <class Smem>
__device__ __forceinline__ void load_a_rows_m(uint32_t (&a)[4], uint32_t lane_base, int m, int k) {
  ptx::ldmatrix_x4(a, Smem::block16(lane_base, m, k));
}
// Columns [16 k, 16 k + 16) of accumulators as the A operand of the next product.
template <DType kDType, int kWidth>
__device__ __forceinline__ void accumulators_to_a(uint32_t (&a)[4], const MmaFragment<kWidth>& f,
                                                  int k) {
  a[0] = ptx::pack<kDType>(f.acc[2 * k][0], f.acc[2 * k][1]);
  a[1] = ptx::pack<kDType>(f.acc[2 * k][2], f.acc[2 * k][3]);
  a[2] = ptx::pack<kDType>(f.acc[2 * k + 1][0], f.acc[2 * k + 1][1]);
  a[3] = ptx::pack<kDType>(f.acc[2 * k + 1][2], f.acc[2 * k + 1][3]);
}

}  // namespace flash_cuda::sm80
