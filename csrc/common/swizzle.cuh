// Shared-memory tiles of 16-bit elements whose 16-byte chunks are permuted row by row, so that
// neither cp.async, ldmatrix nor 4-byte fragment stores meet a bank conflict.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash_cuda {

// kWidth elements a row. Rows of a multiple of 128 bytes permute eight chunks by the row; others
// (64, 192 bytes: two rows fill the banks unevenly) permute four chunks by half the row.
template <int kWidth>
struct SwizzledTile {
  static_assert(kWidth % 32 == 0);
  static constexpr int kRowBytes = kWidth * 2, kChunks = kWidth / 8;
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : 4;  // chunks permuted among themselves
  static constexpr int kGroupBytes = kGroup * 16;

  FLASH_CUDA_HOST_DEVICE static constexpr int permutation(int row) {
    return kGroup == 8 ? row & 7 : (row >> 1) & 3;
  }
  // Byte offset of the 16-byte chunk `chunk` of row `row`.
  FLASH_CUDA_HOST_DEVICE static constexpr uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ permutation(row)) * 16);
  }
  // Byte offset of an element.
  FLASH_CUDA_HOST_DEVICE static constexpr uint32_t element(int row, int col) {
    return offset(row, col / 8) + (col % 8) * 2;
  }

  // ldmatrix.x4 of the 16 x 16 block at (16 row16, 16 col16): the address that a lane gives.
  // `lane_base` = tile address + lane_offset(lane); everything else folds into constants.
  FLASH_CUDA_HOST_DEVICE static constexpr uint32_t lane_offset(int lane) {
    return offset(lane & 15, lane >> 4);
  }
  // The same with the two middle matrices exchanged: registers then come as the pairs of an mma's
  // B operand (from rows that run along k), or as an A operand from a transposed tile.
  FLASH_CUDA_HOST_DEVICE static constexpr uint32_t lane_offset_crossed(int lane) {
    return offset((lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1);
  }
  FLASH_CUDA_HOST_DEVICE static constexpr uint32_t block16(uint32_t lane_base, int row16,
                                                           int col16) {
    constexpr int kPerGroup = kGroup / 2;
    return (lane_base ^ ((col16 % kPerGroup) * 32)) + (col16 / kPerGroup) * kGroupBytes +
           row16 * 16 * kRowBytes;
  }
};

}  // namespace flash_cuda
