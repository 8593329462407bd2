// One kernel for each family of instructions. Layouts are written out here from the figures of
// the PTX ISA, not taken from the emulator or from csrc/, so that the three have to agree.
#include <cuda.h>
#include <cuda_bf16.h>

#include "test_api.h"

// ---- mma.sync: A is rows x k, B is k x 8, both row-major in memory, C and D are 16 x 8 floats
template <class T>
__device__ uint32_t pack(const T* p, int stride) {
  uint32_t out = 0;
  constexpr int n = 4 / sizeof(T);
  for (int i = 0; i < n; ++i) {
    uint32_t bits = 0;
    memcpy(&bits, p + i * stride, sizeof(T));
    out |= bits << (8 * sizeof(T) * i);
  }
  return out;
}

// Figures "fragment layout for matrix A / B with .f16/.bf16, .e4m3/.e5m2 and .tf32 type".
template <class T>
__device__ void load_fragments(const T* a, const T* b, int k, uint32_t* ra, uint32_t* rb) {
  const int group = threadIdx.x >> 2, in_group = threadIdx.x & 3;
  constexpr int n = 4 / sizeof(T);
  for (int r = 0; r < k / (4 * n) * 2; ++r) {
    const int row = r % 2 == 0 ? group : group + 8;
    const int col = in_group * n + (r < 2 ? 0 : 4 * n);
    ra[r] = pack(a + row * k + col, 1);
  }
  for (int r = 0; r < k / (4 * n); ++r) rb[r] = pack(b + (in_group * n + r * 4 * n) * 8 + group, 8);
}

__device__ int c_index(int i) {
  return ((threadIdx.x >> 2) + (i >= 2 ? 8 : 0)) * 8 + (threadIdx.x & 3) * 2 + (i & 1);
}

#define MMA4(name, T, k, types)                                                             \
  __global__ void name##_kernel(const T* a, const T* b, const float* c, float* d) {         \
    uint32_t ra[4], rb[2];                                                                  \
    float x[4];                                                                             \
    load_fragments(a, b, k, ra, rb);                                                        \
    for (int i = 0; i < 4; ++i) x[i] = c[c_index(i)];                                       \
    asm volatile("mma.sync.aligned.m16n8k" #k ".row.col.f32." types                         \
                 ".f32 {%0,%1,%2,%3}, "                                                     \
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                   \
                 : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])                           \
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1])); \
    for (int i = 0; i < 4; ++i) d[c_index(i)] = x[i];                                       \
  }                                                                                         \
  TEST_EXPORT const char* flash_cuda_test_##name(const T* a, const T* b, const float* c,    \
                                                 float* d) {                                \
    return guarded([&] { name##_kernel<<<1, 32>>>(a, b, c, d); });                          \
  }
MMA4(mma_bf16, uint16_t, 16, "bf16.bf16")
MMA4(mma_f16, uint16_t, 16, "f16.f16")
MMA4(mma_e4m3, uint8_t, 32, "e4m3.e4m3")
MMA4(mma_e5m2, uint8_t, 32, "e5m2.e5m2")
MMA4(mma_tf32, uint32_t, 8, "tf32.tf32")

__global__ void mma_bf16_k8_kernel(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  uint32_t ra[2], rb[1];
  float x[4];
  load_fragments(a, b, 8, ra, rb);
  for (int i = 0; i < 4; ++i) x[i] = c[c_index(i)];
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
      : "r"(ra[0]), "r"(ra[1]), "r"(rb[0]));
  for (int i = 0; i < 4; ++i) d[c_index(i)] = x[i];
}
TEST_EXPORT const char* flash_cuda_test_mma_bf16_k8(const uint16_t* a, const uint16_t* b,
                                                    const float* c, float* d) {
  return guarded([&] { mma_bf16_k8_kernel<<<1, 32>>>(a, b, c, d); });
}

// Accumulators of float16: two to a register, rows as for float32.
__global__ void mma_f16_f16_kernel(const uint16_t* a, const uint16_t* b, const uint16_t* c,
                                   uint16_t* d) {
  uint32_t ra[4], rb[2], x[2];
  load_fragments(a, b, 16, ra, rb);
  for (int i = 0; i < 2; ++i) x[i] = c[c_index(2 * i)] | uint32_t(c[c_index(2 * i + 1)]) << 16;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
      : "+r"(x[0]), "+r"(x[1])
      : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
  for (int i = 0; i < 4; ++i) d[c_index(i)] = uint16_t(x[i / 2] >> (16 * (i & 1)));
}
TEST_EXPORT const char* flash_cuda_test_mma_f16_f16(const uint16_t* a, const uint16_t* b,
                                                    const uint16_t* c, uint16_t* d) {
  return guarded([&] { mma_f16_f16_kernel<<<1, 32>>>(a, b, c, d); });
}

// ---- ldmatrix, stmatrix, movmatrix: four 8 x 8 matrices of 16-bit numbers; a lane's registers out
__global__ void ldmatrix_kernel(const uint16_t* in, uint32_t* out, bool transpose) {
  __shared__ alignas(16) uint16_t smem[4 * 64];
  for (int i = threadIdx.x; i < 256; i += 32) smem[i] = in[i];
  __syncwarp();
  const uint32_t address = shared32(smem + threadIdx.x * 8);
  uint32_t r[4];
  if (transpose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = r[i];
}
__global__ void stmatrix_kernel(const uint32_t* in, uint16_t* out, bool transpose) {
  __shared__ alignas(16) uint16_t smem[4 * 64];
  uint32_t r[4];
  for (int i = 0; i < 4; ++i) r[i] = in[threadIdx.x * 4 + i];
  const uint32_t address = shared32(smem + threadIdx.x * 8);
  if (transpose)
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  __syncwarp();
  for (int i = threadIdx.x; i < 256; i += 32) out[i] = smem[i];
}
__global__ void movmatrix_kernel(const uint32_t* in, uint32_t* out) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(in[threadIdx.x]));
  out[threadIdx.x] = r;
}
TEST_EXPORT const char* flash_cuda_test_ldmatrix(const uint16_t* in, uint32_t* out, int transpose) {
  return guarded([&] { ldmatrix_kernel<<<1, 32>>>(in, out, transpose); });
}
TEST_EXPORT const char* flash_cuda_test_stmatrix(const uint32_t* in, uint16_t* out, int transpose) {
  return guarded([&] { stmatrix_kernel<<<1, 32>>>(in, out, transpose); });
}
TEST_EXPORT const char* flash_cuda_test_movmatrix(const uint32_t* in, uint32_t* out) {
  return guarded([&] { movmatrix_kernel<<<1, 32>>>(in, out); });
}

// ---- conversions: out[0] bf16x2, [1] f16x2, [2] e4m3x2, [3] e5m2x2, [4] bf16x2 rz, [5] f16x2 rz,
//      [6] tf32, [7] float16 of the e4m3 pair, [8] of the e5m2 pair
__global__ void convert_kernel(const float* in, uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n / 2) return;
  const float lo = in[2 * i], hi = in[2 * i + 1];
  uint32_t r[9];
  uint16_t e4, e5;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[0]) : "f"(hi), "f"(lo));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r[1]) : "f"(hi), "f"(lo));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(e4) : "f"(hi), "f"(lo));
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(e5) : "f"(hi), "f"(lo));
  asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(r[4]) : "f"(hi), "f"(lo));
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r[5]) : "f"(hi), "f"(lo));
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r[6]) : "f"(lo));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r[7]) : "h"(e4));
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(r[8]) : "h"(e5));
  r[2] = e4;
  r[3] = e5;
  for (int k = 0; k < 9; ++k) out[i * 9 + k] = r[k];
}
TEST_EXPORT const char* flash_cuda_test_convert(const float* in, uint32_t* out, int n) {
  return guarded([&] { convert_kernel<<<(n / 2 + 127) / 128, 128>>>(in, out, n); });
}

// ---- directed rounding and fused operations on triples
__global__ void rounding_kernel(const float* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
  float* o = out + 10 * i;
#define FMA(k, mode) asm("fma." mode ".f32 %0, %1, %2, %3;" : "=f"(o[k]) : "f"(a), "f"(b), "f"(c));
#define ADD(k, mode) asm("add." mode ".f32 %0, %1, %2;" : "=f"(o[k]) : "f"(a), "f"(b));
  FMA(0, "rn")
  FMA(1, "rz") FMA(2, "rm") FMA(3, "rp") ADD(4, "rn") ADD(5, "rz") ADD(6, "rm")
      ADD(7, "rp") asm("mul.rz.f32 %0, %1, %2;" : "=f"(o[8]) : "f"(a), "f"(b));
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(o[9]) : "f"(a), "f"(b), "f"(c));
}
TEST_EXPORT const char* flash_cuda_test_rounding(const float* in, float* out, int n) {
  return guarded([&] { rounding_kernel<<<(n + 63) / 64, 64>>>(in, out, n); });
}

// ---- integers on triples
__global__ void integer_kernel(const uint32_t* in, uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const uint32_t a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
  uint32_t* o = out + 16 * i;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(o[0]) : "r"(a), "r"(b), "r"(c));
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(o[1]) : "r"(a), "r"(b), "r"(c));
  asm("bfe.u32 %0, %1, %2, %3;" : "=r"(o[2]) : "r"(a), "r"(b & 31), "r"(c & 31));
  asm("bfe.s32 %0, %1, %2, %3;" : "=r"(o[3]) : "r"(a), "r"(b & 31), "r"(c & 31));
  asm("bfi.b32 %0, %1, %2, %3, 7;" : "=r"(o[4]) : "r"(a), "r"(b), "r"(c & 31));
  asm("shf.l.wrap.b32 %0, %1, %2, %3;" : "=r"(o[5]) : "r"(a), "r"(b), "r"(c));
  asm("shf.r.clamp.b32 %0, %1, %2, %3;" : "=r"(o[6]) : "r"(a), "r"(b), "r"(c & 63));
  asm("mul.hi.u32 %0, %1, %2;" : "=r"(o[7]) : "r"(a), "r"(b));
  asm("mul.hi.s32 %0, %1, %2;" : "=r"(o[8]) : "r"(a), "r"(b));
  asm("clz.b32 %0, %1;" : "=r"(o[9]) : "r"(a));
  asm("popc.b32 %0, %1;" : "=r"(o[10]) : "r"(a));
  asm("brev.b32 %0, %1;" : "=r"(o[11]) : "r"(a));
  asm("bfind.u32 %0, %1;" : "=r"(o[12]) : "r"(a));
  asm("{ .reg .u32 t; add.cc.u32 t, %1, %2; addc.u32 %0, %3, 0; }"
      : "=r"(o[13])
      : "r"(a), "r"(b), "r"(c));
  asm("shr.s32 %0, %1, %2;" : "=r"(o[14]) : "r"(a), "r"(c & 63));
  asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(o[15]) : "r"(a), "r"(b), "r"(c));
}
TEST_EXPORT const char* flash_cuda_test_integer(const uint32_t* in, uint32_t* out, int n) {
  return guarded([&] { integer_kernel<<<(n + 63) / 64, 64>>>(in, out, n); });
}

// ---- warp collectives: shuffles within segments of 8, vote, match, redux, elect
__global__ void warp_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t v = in[threadIdx.x];
  uint32_t* o = out + 12 * threadIdx.x;
  o[0] = __shfl_sync(~0u, v, threadIdx.x * 5 + 3, 8);
  o[1] = __shfl_up_sync(~0u, v, 3, 8);
  o[2] = __shfl_down_sync(~0u, v, 3, 8);
  o[3] = __shfl_xor_sync(~0u, v, 5);
  o[4] = __ballot_sync(~0u, v & 1);
  o[5] = __any_sync(~0u, v == in[7]) | __all_sync(~0u, v != in[7]) << 1;
  o[6] = __match_any_sync(~0u, v & 7);
  o[7] = __reduce_add_sync(~0u, v);
  o[8] = __reduce_max_sync(~0u, v);
  o[9] = static_cast<uint32_t>(__reduce_min_sync(~0u, static_cast<int>(v)));
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(elected));
  o[10] = elected;
  o[11] = threadIdx.x < 16 ? __shfl_sync(0xffffu, v, 2) : __shfl_sync(0xffff0000u, v, 18);
}
TEST_EXPORT const char* flash_cuda_test_warp(const uint32_t* in, uint32_t* out) {
  return guarded([&] { warp_kernel<<<1, 32>>>(in, out); });
}

// ---- packed halves
__global__ void packed_kernel(const uint32_t* in, uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const uint32_t a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
  uint32_t* o = out + 5 * i;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(o[0]) : "r"(a), "r"(b), "r"(c));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(o[1]) : "r"(a), "r"(b));
  asm("max.bf16x2 %0, %1, %2;" : "=r"(o[2]) : "r"(a), "r"(b));
  asm("neg.bf16x2 %0, %1;" : "=r"(o[3]) : "r"(a));
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(o[4]) : "r"(a), "r"(b));
}
TEST_EXPORT const char* flash_cuda_test_packed(const uint32_t* in, uint32_t* out, int n) {
  return guarded([&] { packed_kernel<<<(n + 63) / 64, 64>>>(in, out, n); });
}

// ---- cp.async with zero fill: copies `valid` of each 16 bytes
__global__ void cp_async_kernel(const uint8_t* in, uint8_t* out, const int* valid) {
  __shared__ alignas(16) uint8_t smem[32 * 16];
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared32(smem + threadIdx.x * 16)),
      "l"(in + threadIdx.x * 16), "r"(valid[threadIdx.x])
      : "memory");
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  for (int i = 0; i < 16; ++i) out[threadIdx.x * 16 + i] = smem[threadIdx.x * 16 + i];
}
TEST_EXPORT const char* flash_cuda_test_cp_async(const uint8_t* in, uint8_t* out,
                                                 const int* valid) {
  return guarded([&] { cp_async_kernel<<<1, 32>>>(in, out, valid); });
}

// ---- blocks that wait for each other: each adds its number when its turn comes
__global__ void turns_kernel(volatile int* turn, int* order, int step) {
  if (threadIdx.x == 0) {
    const int mine =
        step > 0 ? static_cast<int>(blockIdx.x) : static_cast<int>(gridDim.x - 1 - blockIdx.x);
    while (*turn != mine) {
    }
    __threadfence();
    order[mine] = static_cast<int>(blockIdx.x);
    __threadfence();
    *turn = mine + 1;
  }
}
TEST_EXPORT const char* flash_cuda_test_turns(int* turn, int* order, int blocks, int step) {
  return guarded([&] { turns_kernel<<<blocks, 32>>>(turn, order, step); });
}
