// Exchanges between threads in which `mistake` leaves out what orders them. On the schedules of the
// emulator most of them still give the right numbers.
#include "test_api.h"

namespace {

enum Mistake {
  kNone,
  kNoSyncthreads,
  kNoSyncwarp,
  kNoWriterFence,
  kNoReaderFence,
  kBlockFence,
  kPlainFlag,
  kRelaxedArrive,
  kNoSecondSync,
  kNoCopySync,
};

// Neighbours exchange through shared memory, twice through the same buffer.
__global__ void exchange_kernel(const int* in, int* out, int mistake) {
  __shared__ int smem[64];
  int v = in[threadIdx.x];
  for (int round = 0; round < 2; ++round) {
    smem[threadIdx.x] = v;
    if (mistake != kNoSyncthreads) __syncthreads();
    v = smem[threadIdx.x ^ 32] + 1;
    if (mistake != kNoSecondSync) __syncthreads();
  }
  out[threadIdx.x] = v;
}

// Within a warp.
__global__ void warp_exchange_kernel(const int* in, int* out, int mistake) {
  __shared__ int smem[32];
  smem[threadIdx.x] = in[threadIdx.x];
  if (mistake != kNoSyncwarp) __syncwarp();
  out[threadIdx.x] = smem[threadIdx.x ^ 1];
}

// The last block to finish adds up what the others left in global memory.
__global__ void last_block_kernel(const int* in, int* partial, int* ticket, int* out, int mistake) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = in[blockIdx.x];
    if (mistake == kBlockFence)
      __threadfence_block();
    else if (mistake != kNoWriterFence)
      __threadfence();
    last = atomicAdd(ticket, 1) == int(gridDim.x) - 1;
  }
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  if (mistake != kNoReaderFence) __threadfence();
  int sum = 0;
  for (int i = 0; i < int(gridDim.x); ++i) sum += partial[i];
  *out = sum;
}

// Release and acquire through a flag, between two blocks.
__global__ void flag_kernel(const int* in, int* data, int* flag, int* out, int mistake) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    *data = *in;
    if (mistake == kPlainFlag)
      asm volatile("st.relaxed.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
    else
      asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
  } else {
    int ready = 0;
    while (!ready)
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(ready) : "l"(flag) : "memory");
    *out = *data;
  }
}

// One warp hands data to the other by an mbarrier.
__global__ void barrier_kernel(const int* in, int* out, int mistake) {
  __shared__ int data[32];
  __shared__ alignas(8) uint64_t bar;
  if (threadIdx.x == 0)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(shared32(&bar)) : "memory");
  __syncthreads();
  if (threadIdx.x < 32) {
    data[threadIdx.x] = in[threadIdx.x];
    if (mistake == kRelaxedArrive)
      asm volatile("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0], 1;" ::"r"(shared32(&bar))
                   : "memory");
    else
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared32(&bar)) : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra "
        "W;\n}" ::"r"(shared32(&bar))
        : "memory");
    out[threadIdx.x - 32] = data[threadIdx.x - 32];
  }
}

// cp.async of one thread, read by another.
__global__ void copy_kernel(const int* in, int* out, int mistake) {
  __shared__ alignas(16) int smem[64 * 4];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared32(smem + threadIdx.x * 4)),
               "l"(in + threadIdx.x * 4)
               : "memory");
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  if (mistake != kNoCopySync) __syncthreads();
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = smem[(threadIdx.x ^ 32) * 4 + i];
}

}  // namespace

TEST_EXPORT const char* flash_cuda_test_exchange(const int* in, int* out, int mistake) {
  return guarded([&] { exchange_kernel<<<1, 64>>>(in, out, mistake); });
}
TEST_EXPORT const char* flash_cuda_test_warp_exchange(const int* in, int* out, int mistake) {
  return guarded([&] { warp_exchange_kernel<<<1, 32>>>(in, out, mistake); });
}
TEST_EXPORT const char* flash_cuda_test_last_block(const int* in, int* scratch, int* out,
                                                   int mistake) {
  return guarded([&] { last_block_kernel<<<4, 32>>>(in, scratch, scratch + 8, out, mistake); });
}
TEST_EXPORT const char* flash_cuda_test_flag(const int* in, int* scratch, int* out, int mistake) {
  return guarded([&] { flag_kernel<<<2, 32>>>(in, scratch, scratch + 8, out, mistake); });
}
TEST_EXPORT const char* flash_cuda_test_barrier(const int* in, int* out, int mistake) {
  return guarded([&] { barrier_kernel<<<1, 64>>>(in, out, mistake); });
}
TEST_EXPORT const char* flash_cuda_test_copy(const int* in, int* out, int mistake) {
  return guarded([&] { copy_kernel<<<1, 64>>>(in, out, mistake); });
}
