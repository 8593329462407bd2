// A warp-specialised GEMM (TMA ring, wgmma, bulk stores) in which each number of `mistake` plants
// one fault: D[tile] = A B^T for 64 x 64 tiles of float32, A and B bfloat16 with rows of `depth`.
#include <cuda.h>

#include "test_api.h"

namespace {

constexpr int kTile = 64, kStages = 2, kStageBytes = kTile * 128;

enum Mistake {
  kNone,
  kProducerSkipsEmpty,
  kConsumerSkipsFull,
  kProducerParity,
  kConsumerParity,
  kTooFewBytes,
  kTooManyBytes,
  kEmptyCount,
  kReleaseBeforeWait,
  kNoWgmmaWait,
  kNoWgmmaFence,
  kNoProxyFence,
  kNoReadWait,
  kWaitOfOneWarp,
  kNoInitFence,
  kAccumulateFirst,
  kNoStoreBarrier,
  kNoFinalWait,
  kBarrierCount,
  kWrongStage,
  kNoCommit,
};

struct Smem {
  alignas(1024) uint8_t a[kStages][kStageBytes];
  alignas(1024) uint8_t b[kStages][kStageBytes];
  alignas(128) float staging[kTile * kTile];
  alignas(8) uint64_t full[kStages], empty[kStages];
};

__device__ void barrier_init(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared32(bar)), "r"(count)
               : "memory");
}
__device__ void barrier_wait(uint64_t* bar, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra "
      "W;\nD:\n}" ::"r"(shared32(bar)),
      "r"(parity)
      : "memory");
}
__device__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared32(bar)) : "memory");
}
__device__ void barrier_expect(uint64_t* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared32(bar)),
               "r"(bytes)
               : "memory");
}
__device__ void tma_load(void* dst, const CUtensorMap* map, int x, int y, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared32(dst)),
      "l"(map), "r"(x), "r"(y), "r"(shared32(bar))
      : "memory");
}
__device__ uint64_t descriptor(const void* p, int k) {  // K-major, 128-byte swizzle
  const uint64_t start = (shared32(p) + k * 32) >> 4;
  return start | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
__device__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
      "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
      "%27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ void produce(Smem& s, const CUtensorMap* a, const CUtensorMap* b, int tiles, int steps,
                        int tiles_n, int mistake) {
  int n = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
    for (int k = 0; k < steps; ++k, ++n) {
      const int stage = n % kStages, parity = n / kStages & 1;
      if (mistake != kProducerSkipsEmpty)
        barrier_wait(&s.empty[stage], mistake == kProducerParity ? parity : parity ^ 1);
      const int wrong = mistake == kTooFewBytes ? -128 : mistake == kTooManyBytes ? 128 : 0;
      barrier_expect(&s.full[stage], 2 * kStageBytes + wrong);
      tma_load(s.a[stage], a, k * 64, tile / tiles_n * kTile, &s.full[stage]);
      tma_load(s.b[stage], b, k * 64, tile % tiles_n * kTile, &s.full[stage]);
    }
}

__device__ void store(Smem& s, const float (&d)[32], float* out, int mistake) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (thread == 0 && mistake != kNoReadWait)
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  asm volatile("bar.sync 1, 128;" ::: "memory");  // the last store has read the staging buffer
  for (int i = 0; i < 32; ++i) {
    const int row = warp * 16 + lane / 4 + (i & 2 ? 8 : 0),
              col = i / 4 * 8 + lane % 4 * 2 + (i & 1);
    s.staging[row * kTile + col] = d[i];
  }
  if (mistake != kNoProxyFence) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (mistake == kBarrierCount && warp == 3) return;
  if (mistake != kNoStoreBarrier) asm volatile("bar.sync 1, 128;" ::: "memory");
  if (thread != 0) return;
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out),
               "r"(shared32(s.staging)), "r"(kTile * kTile * 4)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ void consume(Smem& s, float* out, int tiles, int steps, int mistake) {
  int n = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float d[32];
    for (int k = 0; k < steps; ++k, ++n) {
      const int stage = n % kStages, parity = n / kStages & 1;
      if (mistake != kConsumerSkipsFull)
        barrier_wait(&s.full[stage], mistake == kConsumerParity ? parity ^ 1 : parity);
      const int read = mistake == kWrongStage ? (stage + 1) % kStages : stage;
      if (mistake != kNoWgmmaFence) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      for (int kk = 0; kk < 4; ++kk)
        wgmma(d, descriptor(s.a[read], kk), descriptor(s.b[read], kk),
              k > 0 || kk > 0 || mistake == kAccumulateFirst);
      if (mistake != kNoCommit) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (mistake == kReleaseBeforeWait && threadIdx.x == 0) barrier_arrive(&s.empty[stage]);
      if (mistake == kWaitOfOneWarp ? threadIdx.x < 32 : mistake != kNoWgmmaWait)
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (mistake != kReleaseBeforeWait && threadIdx.x == 0) barrier_arrive(&s.empty[stage]);
    }
    store(s, d, out + size_t(tile) * kTile * kTile, mistake);
  }
  if (threadIdx.x == 0 && mistake != kNoFinalWait)
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__global__ void __launch_bounds__(160)
    pipeline_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                    float* out, int tiles, int steps, int tiles_n, int mistake) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Smem& s = *reinterpret_cast<Smem*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], mistake == kEmptyCount ? 2 : 1);
    }
    if (mistake != kNoInitFence) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128)
    consume(s, out, tiles, steps, mistake);
  else if (threadIdx.x == 128)
    produce(s, &a, &b, tiles, steps, tiles_n, mistake);
}

CUtensorMap matrix_map(const void* p, int rows, int depth) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault,
                                   &found);
  CUtensorMap map;
  const cuuint64_t dims[2] = {cuuint64_t(depth), cuuint64_t(rows)},
                   strides[1] = {cuuint64_t(depth) * 2};
  const cuuint32_t box[2] = {64, kTile}, ones[2] = {1, 1};
  const auto fn = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode);
  if (fn(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(p), dims, strides, box, ones,
         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    throw std::runtime_error("tensor map refused");
  return map;
}

}  // namespace

TEST_EXPORT const char* flash_cuda_test_pipeline(const void* a, const void* b, float* out, int rows,
                                                 int columns, int depth, int blocks, int mistake) {
  return guarded([&] {
    const int bytes = sizeof(Smem) + 1024, tiles_n = columns / kTile;
    cudaFuncSetAttribute(pipeline_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    pipeline_kernel<<<blocks, 160, bytes>>>(matrix_map(a, rows, depth),
                                            matrix_map(b, columns, depth), out,
                                            rows / kTile * tiles_n, depth / 64, tiles_n, mistake);
  });
}
