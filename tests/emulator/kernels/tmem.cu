// Tensor memory handed from warps to warps and from the matrix unit to warps; a step that `mistake`
// leaves out is a race, whatever the numbers are.
#include "ptx/fence.h"
#include "ptx/mbarrier.h"
#include "ptx/tcgen05.h"
#include "test_api.h"

using namespace flash_cuda;

namespace {

constexpr int kRounds = 2, kColumns = 16, kProduct = 64;  // first column of the product
constexpr uint32_t kOnes = 0x3f803f80;                    // two bfloat16
constexpr uint64_t kDescriptor = ptx::tcgen05_desc_base(2048, 128, 0);
constexpr uint32_t kInstruction = ptx::tcgen05_f16_instruction(true, false, false, 128, 64);

__device__ uint32_t lanes_of_warp() { return threadIdx.x / 32 % 4 << 21; }

// Writers (warps 0 to 3) store, readers (warps 4 to 7) load the same lanes.
__device__ void hand_over(uint32_t tmem, float* out, int mistake) {
  const bool writes = threadIdx.x < 128;
  uint32_t r[kColumns];
  for (int round = 0; round < kRounds; ++round) {
    if (writes) {
      if (round && mistake != 7) ptx::tcgen05_fence_after_thread_sync();
      for (int i = 0; i < kColumns; ++i) r[i] = 1000 * round + 10 * threadIdx.x + i;
      ptx::tcgen05_st_x16(tmem + lanes_of_warp(), r);
      if (mistake != 1) ptx::tcgen05_wait_st();
      if (mistake != 2) ptx::tcgen05_fence_before_thread_sync();
    }
    if (mistake != 4) __syncthreads();
    if (!writes) {
      if (mistake != 3) ptx::tcgen05_fence_after_thread_sync();
      ptx::tcgen05_ld_x16(r, tmem + lanes_of_warp());
      if (mistake != 5) ptx::tcgen05_wait_ld();
      ptx::tcgen05_loaded(r);
      if (mistake != 6) ptx::tcgen05_fence_before_thread_sync();
      uint32_t sum = 0;
      for (int i = 0; i < kColumns; ++i) sum += r[i];
      out[128 * round + threadIdx.x - 128] = float(sum);
    }
    __syncthreads();
  }
}

// A product of ones, 128 x 64 x 16: no layout matters.
__device__ void multiply(uint32_t tmem, uint32_t ones, uint32_t bar, float* out, int mistake) {
  if (threadIdx.x == 0) {
    const uint64_t operand = ptx::tcgen05_desc(ones, kDescriptor);
    ptx::tcgen05_mma_ss(tmem + kProduct, operand, operand, kInstruction, false);
    if (mistake == 8)
      ptx::mbarrier_arrive(bar);
    else
      ptx::tcgen05_commit(bar);
  }
  if (threadIdx.x < 128) return;
  ptx::mbarrier_wait(bar, 0);
  if (mistake != 9) ptx::tcgen05_fence_after_thread_sync();
  uint32_t r[kColumns];
  ptx::tcgen05_ld_x16(r, tmem + kProduct + lanes_of_warp());
  ptx::tcgen05_wait_ld();
  ptx::tcgen05_loaded(r);
  ptx::tcgen05_fence_before_thread_sync();
  out[256 + threadIdx.x - 128] = __uint_as_float(r[kColumns - 1]);
}

__global__ void tmem_kernel(float* out, int mistake) {
  __shared__ alignas(128) uint32_t ones[128 * 16 / 2];
  __shared__ alignas(8) uint64_t bar;
  __shared__ uint32_t tmem;
  for (int i = threadIdx.x; i < 128 * 16 / 2; i += blockDim.x) ones[i] = kOnes;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared32(&bar), 1);
    ptx::fence_mbarrier_init();
  }
  ptx::fence_proxy_async_shared();
  if (threadIdx.x < 32) ptx::tcgen05_alloc(shared32(&tmem), 128);
  __syncthreads();
  hand_over(tmem, out, mistake);
  multiply(tmem, shared32(ones), shared32(&bar), out, mistake);
  __syncthreads();
  if (threadIdx.x < 32) ptx::tcgen05_dealloc(tmem, 128);
}

}  // namespace

TEST_EXPORT const char* flash_cuda_test_tmem(float* out, int mistake) {
  return guarded([&] { tmem_kernel<<<1, 256>>>(out, mistake); });
}
