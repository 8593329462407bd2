// Taking over thread blocks that have not started (PTX ISA, "clusterlaunchcontrol").
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

// Asks for the next block of the grid; the answer (16 bytes, aligned) completes on `bar`.
__device__ __forceinline__ void cluster_launch_try_cancel(uint32_t answer, uint32_t bar) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], "
      "[%1];" ::"r"(answer),
      "r"(bar)
      : "memory");
}

// blockIdx.x of the block that the answer gives away, or -1 if there was none left.
__device__ __forceinline__ int cluster_launch_answer(uint32_t answer) {
  int block;
  asm volatile(
      "{\n.reg .b128 answer;\n.reg .pred given;\n.reg .b64 lo, hi;\n"
      "ld.shared.v2.b64 {lo, hi}, [%1];\n"
      "mov.b128 answer, {lo, hi};\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 given, answer;\n"
      "mov.b32 %0, -1;\n"
      "@given clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, answer;\n}"
      : "=r"(block)
      : "r"(answer)
      : "memory");
  return block;
}

}  // namespace flash_cuda::ptx
