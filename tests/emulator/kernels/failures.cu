// Kernels that must be stopped, and launches that must be refused.
#include <cassert>

#include "test_api.h"

namespace {

__device__ int counter;  // left in any state by a launch that is cut short

__device__ __noinline__ int deep(volatile int* p, int n) {
  int frame[64];
  for (int i = 0; i < 64; ++i) frame[i] = p[0] + n + i;
  return n <= 0 ? frame[3] : deep(p, n - 1) + frame[n % 64];
}

__global__ void fail_kernel(int which, int* p) {
  __shared__ int smem[32];
  switch (which) {
    case 0:
      p[0] = 1;
      break;
    case 1:
      *reinterpret_cast<volatile int*>(8) = 1;
      break;
    case 2:
      *reinterpret_cast<volatile int*>(uint64_t(1) << 45) = 1;
      break;
    case 3: {
      const uint32_t address = shared32(smem) + 300 * 1024;
      asm volatile("st.shared.u32 [%0], %0;" ::"r"(address) : "memory");
      break;
    }
    case 4:
      asm volatile("st.shared.u32 [%0], %0;" ::"r"(shared32(smem) + 2) : "memory");
      break;
    case 5:
      __trap();
      break;
    case 6:
      assert(p == nullptr);
      break;
    case 7:
      while (*const_cast<volatile int*>(p) >= 0) {
      }
      break;
    case 8:
      if (threadIdx.x < 16)
        __syncthreads();
      else
        asm volatile("bar.sync 1, 32;");
      break;
    case 9:
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared32(smem)) : "memory");
      break;
    case 10:
      p[0] = deep(p, 1 << 20);
      break;
    case 11: {
      unsigned x = 1;
      for (unsigned i = 0; i != ~0u || *p != 77; ++i) x = x * 1664525u + (x >> 3);
      p[1] = int(x);
      break;
    }
    case 12:
      if (atomicAdd(&counter, 1) % 32 == 5) __trap();
      break;
    case 13:
      p[0] = atomicAdd(&counter, 1);
      break;
  }
}

// Two warpgroups ask for 240 registers, the third gives back all but kLeft of its 168.
template <int kLeft>
__global__ void __launch_bounds__(384, 1) registers_kernel(int* p) {
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLeft));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  }
  __syncthreads();
  if (threadIdx.x == 0) *p = kLeft;
}
// Uses global memory in the ways that there are, before griddepcontrol.wait or after it.
__global__ void __launch_bounds__(32) ahead_kernel(int which, int late, int* p) {
  __shared__ __align__(16) int smem[4];
  __shared__ __align__(8) uint64_t barrier;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared32(&barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (which == 9) return;
  if (!late || (which == 8 && threadIdx.x != 1)) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  if (which != 8) __syncthreads();
  if (threadIdx.x == (which == 8)) {
    int loaded = 1;
    switch (which) {
      case 1:
      case 8:
        loaded = *const_cast<volatile int*>(p) + 1;
        break;
      case 2:
        *const_cast<volatile int*>(p) = 0;
        break;
      case 3:
        atomicAdd(p, 1);
        break;
      case 4:
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared32(smem)), "l"(p)
                     : "memory");
        asm volatile("cp.async.wait_all;" ::: "memory");
        break;
      case 5:
        asm volatile(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" ::"r"(shared32(&barrier))
            : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], 16, [%2];" ::"r"(shared32(smem)),
            "l"(p), "r"(shared32(&barrier))
            : "memory");
        asm volatile(
            "{\n.reg .pred done;\nWAIT:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra WAIT;\n}" ::"r"(
                shared32(&barrier))
            : "memory");
        break;
      case 6:
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 16;" ::"l"(p),
                     "r"(shared32(smem))
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        break;
      case 7:
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        break;
      case 11:
        atomicAdd(&counter, 1);
        break;
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    *const_cast<volatile int*>(p) = loaded;
    if (which >= 10) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}
__global__ void __launch_bounds__(64) small_kernel(int* p) { *p = 1; }
__global__ void large_kernel(int* p) {
  extern __shared__ int dynamic[];
  dynamic[threadIdx.x] = 1;
  *p = dynamic[0];
}

}  // namespace

TEST_EXPORT const char* flash_cuda_test_fail(int which, int* p) {
  return guarded([&] { fail_kernel<<<1, 32>>>(which, p); });
}
TEST_EXPORT const char* flash_cuda_test_registers(int* p, int left) {
  return guarded(
      [&] { (left == 24 ? registers_kernel<24> : registers_kernel<32>)<<<1, 384>>>(p); });
}
TEST_EXPORT const char* flash_cuda_test_ahead(int which, int late, int* p, int ahead) {
  return guarded([&] {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = ahead;
    cudaLaunchConfig_t config{};
    config.gridDim = 1;
    config.blockDim = 32;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, ahead_kernel, which, late, p);
  });
}
TEST_EXPORT const char* flash_cuda_test_small(int* p, int threads, int blocks) {
  return guarded([&] { small_kernel<<<blocks, threads>>>(p); });
}
TEST_EXPORT const char* flash_cuda_test_large(int* p, int bytes, int opt_in) {
  return guarded([&] {
    cudaFuncSetAttribute(large_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in);
    large_kernel<<<1, 32, bytes>>>(p);
  });
}
