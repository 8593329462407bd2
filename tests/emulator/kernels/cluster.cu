// Clusters of two blocks: remote arrivals, copies to the peer, multicast; and wgmma operands in
// every layout.
#include <cuda.h>

#include "test_api.h"

namespace {

__device__ uint32_t peer_address(uint32_t address, uint32_t rank) {
  uint32_t out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}
__device__ uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
__device__ void wait_phase_0(uint32_t bar) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], "
      "0;\n@!p bra W;\n}" ::"r"(bar)
      : "memory");
}

// Each block sends 256 bytes to the other: how 0 st.async, 1 a bulk copy, 2 a plain remote store.
__global__ void __cluster_dims__(2, 1, 1)
    peer_kernel(const int* in, int* out, int how, int mistake) {
  __shared__ alignas(16) int mine[64], theirs[64];
  __shared__ alignas(8) uint64_t bar;
  const uint32_t rank = cluster_rank(), b = shared32(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(how == 2 ? 64 : 1)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (how != 2)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" ::"r"(b) : "memory");
  }
  mine[threadIdx.x] = in[rank * 64 + threadIdx.x];
  if (how == 1 && mistake != 2) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (mistake == 1)
    __syncthreads();
  else
    cluster_sync();  // the peer's barrier is initialised
  const uint32_t there = peer_address(shared32(theirs), rank ^ 1),
                 bar_there = peer_address(b, rank ^ 1);
  if (how == 0) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     there + threadIdx.x * 4),
                 "r"(mine[threadIdx.x]), "r"(bar_there)
                 : "memory");
  } else if (how == 1) {
    if (threadIdx.x == 0)
      asm volatile(
          "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 256, "
          "[%2];" ::"r"(there),
          "r"(shared32(mine)), "r"(bar_there)
          : "memory");
  } else {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there + threadIdx.x * 4),
                 "r"(mine[threadIdx.x])
                 : "memory");
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar_there)
                 : "memory");
  }
  wait_phase_0(b);
  out[rank * 64 + threadIdx.x] = theirs[threadIdx.x];
  cluster_sync();  // nobody leaves while its memory is read or written
}

// Block 0 loads rows for both by multicast.
__global__ void __cluster_dims__(2, 1, 1)
    multicast_kernel(const __grid_constant__ CUtensorMap map, int* out) {
  __shared__ alignas(128) int tile[32 * 8];
  __shared__ alignas(8) uint64_t bar;
  const uint32_t rank = cluster_rank(), b = shared32(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(b) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(b) : "memory");
  }
  cluster_sync();
  if (rank == 0 && threadIdx.x == 0)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
        "cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared32(tile)),
        "l"(&map), "r"(-2), "r"(3), "r"(b), "h"(uint16_t(3))
        : "memory");
  wait_phase_0(b);
  for (int i = threadIdx.x; i < 256; i += blockDim.x) out[rank * 256 + i] = tile[i];
  cluster_sync();
}

// One tile through shared memory, as the tensor map lays it down.
__global__ void tile_kernel(const __grid_constant__ CUtensorMap map, int x, int y, int bytes,
                            uint8_t* out, const __grid_constant__ CUtensorMap store, int add) {
  extern __shared__ __align__(1024) uint8_t raw[];
  __shared__ alignas(8) uint64_t bar;
  uint8_t* tile =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  const uint32_t b = shared32(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.proxy.async;" ::"r"(b) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%2, %3}], [%4];" ::"r"(shared32(tile)),
        "l"(&map), "r"(x), "r"(y), "r"(b)
        : "memory");
  }
  __syncthreads();
  wait_phase_0(b);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = tile[i];
  if (threadIdx.x != 0) return;
  if (add)
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];" ::
            "l"(&store),
        "r"(x), "r"(y), "r"(shared32(tile))
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&store),
        "r"(x), "r"(y), "r"(shared32(tile))
        : "memory");
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

decltype(&cuTensorMapEncodeTiled) encoder() {
  void* fn = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found);
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(fn);
}
CUtensorMap map_2d(const void* p, CUtensorMapDataType type, int size, int width, int rows,
                   int box_x, int box_y, int swizzle) {
  CUtensorMap map;
  const cuuint64_t dims[2] = {cuuint64_t(width), cuuint64_t(rows)},
                   strides[1] = {cuuint64_t(width) * size};
  const cuuint32_t box[2] = {cuuint32_t(box_x), cuuint32_t(box_y)}, ones[2] = {1, 1};
  if (encoder()(&map, type, 2, const_cast<void*>(p), dims, strides, box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CUtensorMapSwizzle(swizzle),
                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    throw std::runtime_error("tensor map refused");
  return map;
}

}  // namespace

TEST_EXPORT const char* flash_cuda_test_peer(const int* in, int* out, int how, int mistake) {
  return guarded([&] { peer_kernel<<<2, 64>>>(in, out, how, mistake); });
}
TEST_EXPORT const char* flash_cuda_test_multicast(const int* in, int* out) {
  return guarded([&] {
    multicast_kernel<<<2, 64>>>(map_2d(in, CU_TENSOR_MAP_DATA_TYPE_INT32, 4, 32, 10, 32, 8, 0),
                                out);
  });
}
// bfloat16 (size 2) or float32 (size 4) matrices of `width` x `rows`.
TEST_EXPORT const char* flash_cuda_test_tile(const void* in, void* tile, void* stored, int size,
                                             int width, int rows, int box_x, int box_y, int x,
                                             int y, int swizzle, int add) {
  return guarded([&] {
    const auto type =
        size == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    tile_kernel<<<1, 64, 32 << 10>>>(map_2d(in, type, size, width, rows, box_x, box_y, swizzle), x,
                                     y, box_x * box_y * size, static_cast<uint8_t*>(tile),
                                     map_2d(stored, type, size, width, rows, box_x, box_y, swizzle),
                                     add);
  });
}
