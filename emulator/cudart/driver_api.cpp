// Device queries and the driver entry points that launchers ask for (tensor maps).
#include "device.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

#include "machine.h"

using px::M;

// Defined by the generated index of the library.
extern "C" const int flash_cuda_emulator_library_cc;

void prepare_settings() {
  px::load_environment();
  if (!M.settings.compute_capability)
    M.settings.compute_capability = uint32_t(flash_cuda_emulator_library_cc);
}

int emulated_compute_capability() {
  prepare_settings();
  return int(M.settings.compute_capability);
}

int emulated_max_smem() {
  switch (emulated_compute_capability()) {
    case 80:
    case 87:
      return 163 << 10;
    case 86:
    case 89:
    case 120:
      return 99 << 10;
    default:
      return 227 << 10;
  }
}

// What the binding asks instead of the CUDA runtime when it fills FwdParams for CPU tensors.
extern "C" __attribute__((visibility("default"))) void flash_cuda_emulator_device(
    int* compute_capability, int* num_sms, int* max_smem_per_block) {
  *compute_capability = emulated_compute_capability();
  *num_sms = int(M.settings.num_sms);
  *max_smem_per_block = emulated_max_smem();
}

extern "C" {

cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "flash_cuda emulator");
  p->major = emulated_compute_capability() / 10;
  p->minor = emulated_compute_capability() % 10;
  p->multiProcessorCount = int(M.settings.num_sms);
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = size_t(emulated_max_smem());
  p->sharedMemPerMultiprocessor = size_t(emulated_max_smem()) + 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->warpSize = 32;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  switch (a) {
    case cudaDevAttrMultiProcessorCount:
      *v = p.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *v = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *v = p.minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *v = int(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *v = int(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *v = int(p.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *v = 1024;
      break;
    case cudaDevAttrWarpSize:
      *v = 32;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *v = 65535;
      break;
    case cudaDevAttrMaxGridDimX:
      *v = 0x7fffffff;
      break;
    case cudaDevAttrL2CacheSize:
      *v = 50 << 20;
      break;
    default:
      *v = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void const*, int, size_t) {
  *n = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, void const*, int, size_t,
                                                                   unsigned) {
  *n = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* n, void const*, cudaLaunchConfig_t const* c) {
  unsigned size = 1;
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      auto const& d = c->attrs[i].val.clusterDim;
      size = d.x * d.y * d.z;
    }
  *n = std::max(1, int(M.settings.num_sms / size));
  return cudaSuccess;
}

// The rules of the driver that a launcher can break.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* base, cuuint64_t const* dims, cuuint64_t const* strides,
                                cuuint32_t const* box, cuuint32_t const* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill oob) {
  constexpr uint32_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (!map || uint64_t(map) % 64 || rank < 1 || rank > 5 || uint32_t(type) > 12)
    return CUDA_ERROR_INVALID_VALUE;
  if (!base || uint64_t(base) % 16) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (dims[i] == 0 || dims[i] > uint64_t(1) << 32) return CUDA_ERROR_INVALID_VALUE;
    if (box[i] == 0 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    if (element_strides && (element_strides[i] == 0 || element_strides[i] > 8))
      return CUDA_ERROR_INVALID_VALUE;
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= uint64_t(1) << 40))
      return CUDA_ERROR_INVALID_VALUE;
  }
  uint32_t const inner = box[0] * kBytes[uint32_t(type)];
  uint32_t const span[] = {0, 32, 64, 128};
  if (inner % 16) return CUDA_ERROR_INVALID_VALUE;
  if (uint32_t(swizzle) > 0 && uint32_t(swizzle) < 4 && inner > span[uint32_t(swizzle)])
    return CUDA_ERROR_INVALID_VALUE;
  px::encode_tensor_map(map, int(type), rank, base, reinterpret_cast<uint64_t const*>(dims),
                        reinterpret_cast<uint64_t const*>(strides), box, element_strides,
                        int(interleave), int(swizzle), int(oob));
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return CUDA_SUCCESS;
}
cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}

static cudaError_t entry_point(char const* symbol, void** fn, cudaDriverEntryPointQueryResult* q) {
  *fn = !strcmp(symbol, "cuTensorMapEncodeTiled") ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled)
        : !strcmp(symbol, "cuDriverGetVersion")   ? reinterpret_cast<void*>(&cuDriverGetVersion)
                                                  : nullptr;
  if (q) *q = *fn ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(char const* symbol, void** fn, unsigned long long,
                                    cudaDriverEntryPointQueryResult* q) {
  return entry_point(symbol, fn, q);
}
cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** fn, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* q) {
  return entry_point(symbol, fn, q);
}

}  // extern "C"
