// The slice of the CUDA runtime that launchers use, over the emulator. Everything is synchronous;
// "device" memory is host memory. Linked with hidden symbols, so that a real libcudart can live
// in the same process.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "device.h"
#include "machine.h"

using px::M;

namespace {

struct Kernel {
  px::KernelInfo const* info = nullptr;
  char const* name = "";
  int max_dynamic_smem = 48 << 10;
};
struct Configuration {
  dim3 grid, block;
  size_t smem;
  cudaStream_t stream;
};

// Function-local: registration runs from static constructors.
std::map<void const*, Kernel>& kernels() {
  static std::map<void const*, Kernel> m;
  return m;
}
std::map<void const*, px::VariableInfo const*>& variables() {
  static std::map<void const*, px::VariableInfo const*> m;
  return m;
}
std::vector<std::pair<void const*, char const*>>& unresolved_variables() {
  static std::vector<std::pair<void const*, char const*>> v;
  return v;
}
thread_local std::vector<Configuration> configurations;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t e) { return last_error = e; }

// Modules and host code register in any order, so names are resolved on first use.
Kernel* resolve(void const* host) {
  auto it = kernels().find(host);
  if (it == kernels().end()) return nullptr;
  Kernel& k = it->second;
  if (!k.info) k.info = px::find_kernel(k.name);
  return &k;
}

cudaError_t check_launch(Kernel const& k, px::Launch const& l, size_t smem) {
  px::KernelInfo const& info = *k.info;
  uint64_t const threads = uint64_t(l.block[0]) * l.block[1] * l.block[2];
  uint64_t const cluster = uint64_t(l.cluster[0]) * l.cluster[1] * l.cluster[2];
  if (threads == 0 || threads > 1024 || l.block[2] > 64) return cudaErrorInvalidConfiguration;
  if (info.max_threads && threads > info.max_threads) return cudaErrorInvalidConfiguration;
  for (int i = 0; i < 3; ++i)
    if (!l.grid[i] || !l.cluster[i] || l.grid[i] % l.cluster[i])
      return cudaErrorInvalidConfiguration;
  if (l.grid[1] > 65535 || l.grid[2] > 65535 || l.grid[0] > 0x7fffffffu)
    return cudaErrorInvalidConfiguration;
  if (cluster > px::kMaxClusterSize) return cudaErrorInvalidClusterSize;
  if (cluster > 1 && emulated_compute_capability() < 90) return cudaErrorInvalidConfiguration;
  if (smem > size_t(k.max_dynamic_smem)) return cudaErrorInvalidValue;
  size_t const total = info.dynamic_smem_offset + smem;
  if (total > size_t(emulated_max_smem()) + 1024) return cudaErrorInvalidValue;
  return cudaSuccess;
}

cudaError_t launch(void const* fn, dim3 grid, dim3 block, dim3 cluster, void** args, size_t smem,
                   bool ahead = false) {
  Kernel* k = resolve(fn);
  if (!k) return fail(cudaErrorInvalidDeviceFunction);
  if (!k->info)
    throw px::EmulatorError(std::string("emulator: no translated PTX for kernel ") +
                            px::demangle(k->name));
  prepare_settings();
  px::KernelInfo const& info = *k->info;
  px::Launch l{{grid.x, grid.y, grid.z},
               {block.x, block.y, block.z},
               {cluster.x, cluster.y, cluster.z},
               uint32_t(smem),
               ahead};
  if (cluster.x * cluster.y * cluster.z == 1 && info.cluster[0])
    for (int i = 0; i < 3; ++i) l.cluster[i] = info.cluster[i];
  if (cudaError_t const e = check_launch(*k, l, smem)) return fail(e);
  std::vector<uint8_t> buffer(info.param_bytes + 256);
  auto* params = reinterpret_cast<uint8_t*>((uint64_t(buffer.data()) + 127) & ~uint64_t(127));
  for (uint32_t i = 0; i < info.num_params; ++i)
    memcpy(params + info.params[i].offset, args[i], info.params[i].size);
  px::run_kernel(info, l, params);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// ---- registration, called by what nvcc adds to an object
void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, char const* host, char*, char const* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  kernels()[host].name = name;
}
void __cudaRegisterVar(void**, char* host, char*, char const* name, int, size_t, int, int) {
  unresolved_variables().emplace_back(host, name);
}
cudaError_t __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, void* stream) {
  configurations.push_back({grid, block, smem, static_cast<cudaStream_t>(stream)});
  return cudaSuccess;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* smem, void* stream) {
  Configuration const c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *smem = c.smem;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* fn) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(fn));
  return cudaSuccess;
}

// ---- launches
cudaError_t cudaLaunchKernel(void const* fn, dim3 grid, dim3 block, void** args, size_t smem,
                             cudaStream_t) {
  return launch(fn, grid, block, dim3(1, 1, 1), args, smem);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void** args, size_t smem,
                               cudaStream_t) {
  return launch(reinterpret_cast<void const*>(k), grid, block, dim3(1, 1, 1), args, smem);
}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3 grid, dim3 block, void** args, size_t smem,
                                    cudaStream_t) {
  return launch(reinterpret_cast<void const*>(k), grid, block, dim3(1, 1, 1), args, smem);
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* c, void const* fn, void** args) {
  dim3 cluster(1, 1, 1);
  bool ahead = false;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    auto const& value = c->attrs[i].val;
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = dim3(value.clusterDim.x, value.clusterDim.y, value.clusterDim.z);
    if (c->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
      ahead = value.programmaticStreamSerializationAllowed != 0;
  }
  return launch(fn, c->gridDim, c->blockDim, cluster, args, c->dynamicSmemBytes, ahead);
}
cudaError_t cudaFuncSetAttribute(void const* fn, cudaFuncAttribute attribute, int value) {
  Kernel* k = resolve(fn);
  if (!k) return fail(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > emulated_max_smem()) return fail(cudaErrorInvalidValue);
  k->max_dynamic_smem = std::max(value, 48 << 10);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, void const* fn) {
  Kernel* k = resolve(fn);
  if (!k || !k->info) return fail(cudaErrorInvalidDeviceFunction);
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = k->info->max_threads ? int(k->info->max_threads) : 1024;
  a->maxDynamicSharedSizeBytes = k->max_dynamic_smem;
  a->sharedSizeBytes = k->info->dynamic_smem_offset - 1024;
  return cudaSuccess;
}

// ---- memory
cudaError_t cudaMalloc(void** p, size_t n) {
  *p = aligned_alloc(256, (n + 511) / 256 * 256);
  if (!*p) return fail(cudaErrorMemoryAllocation);
  memset(*p, 0xff, n);  // NaN in every floating-point type
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
cudaError_t cudaFree(void* p) {
  free(p);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMemcpy(void* d, void const* s, size_t n, cudaMemcpyKind) {
  memcpy(d, s, n);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* d, void const* s, size_t n, cudaMemcpyKind, cudaStream_t) {
  memcpy(d, s, n);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* d, int v, size_t n) {
  memset(d, v, n);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t) {
  memset(d, v, n);
  return cudaSuccess;
}
static uint8_t* symbol_address(void const* symbol) {
  for (auto const& [host, name] : unresolved_variables()) {
    if (host != symbol) continue;
    px::VariableInfo const* v = px::find_variable(name);
    return v ? static_cast<uint8_t*>(v->address) : nullptr;
  }
  return nullptr;
}
cudaError_t cudaGetSymbolAddress(void** p, void const* symbol) {
  *p = symbol_address(symbol);
  return *p ? cudaSuccess : fail(cudaErrorInvalidSymbol);
}
cudaError_t cudaMemcpyToSymbol(void const* symbol, void const* src, size_t n, size_t offset,
                               cudaMemcpyKind) {
  uint8_t* p = symbol_address(symbol);
  if (!p) return fail(cudaErrorInvalidSymbol);
  memcpy(p + offset, src, n);
  return cudaSuccess;
}
cudaError_t cudaMemcpyFromSymbol(void* dst, void const* symbol, size_t n, size_t offset,
                                 cudaMemcpyKind) {
  uint8_t* p = symbol_address(symbol);
  if (!p) return fail(cudaErrorInvalidSymbol);
  memcpy(dst, p + offset, n);
  return cudaSuccess;
}

// ---- errors, streams, events
cudaError_t cudaGetLastError() {
  cudaError_t const e = last_error;
  last_error = cudaSuccess;
  return e;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
char const* cudaGetErrorName(cudaError_t e) {
  return e == cudaSuccess                      ? "cudaSuccess"
         : e == cudaErrorInvalidValue          ? "cudaErrorInvalidValue"
         : e == cudaErrorInvalidConfiguration  ? "cudaErrorInvalidConfiguration"
         : e == cudaErrorInvalidClusterSize    ? "cudaErrorInvalidClusterSize"
         : e == cudaErrorInvalidDeviceFunction ? "cudaErrorInvalidDeviceFunction"
                                               : "cudaErrorUnknown";
}
char const* cudaGetErrorString(cudaError_t e) {
  return e == cudaSuccess                      ? "no error"
         : e == cudaErrorInvalidValue          ? "invalid argument"
         : e == cudaErrorInvalidConfiguration  ? "invalid configuration argument"
         : e == cudaErrorInvalidClusterSize    ? "invalid cluster size"
         : e == cudaErrorInvalidDeviceFunction ? "invalid device function"
                                               : "unknown error";
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) {
  *e = nullptr;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* t, cudaEvent_t, cudaEvent_t) {
  *t = 1;
  return cudaSuccess;
}

}  // extern "C"
