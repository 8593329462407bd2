#include "api/device.h"

#include <array>
#include <mutex>
#include <stdexcept>

#include "api/refusal.h"

#if defined(FLASH_CUDA_WITH_SM80) || defined(FLASH_CUDA_WITH_SM90) || defined(FLASH_CUDA_WITH_SM100)
#include <cuda_runtime_api.h>
#define FLASH_CUDA_HAS_RUNTIME 1
#endif

namespace flash_cuda {

#ifdef FLASH_CUDA_HAS_RUNTIME

namespace {

constexpr int kMaxDevices = 64;

std::string version_text(int version) { return join(version / 1000, ".", version % 1000 / 10); }

[[noreturn]] void fail(cudaError_t error) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  std::string text = join("CUDA: ", cudaGetErrorString(error));
  if (driver / 1000 < runtime / 1000) {
    text += join("; flash_cuda was built with CUDA ", version_text(runtime),
                 " and the driver serves CUDA up to ", version_text(driver),
                 ": update the driver or build with an older toolkit");
  }
  throw std::runtime_error(text);
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, which, device);
  if (error != cudaSuccess) fail(error);
  return value;
}

}  // namespace

const DeviceInfo& device_info(int index) {
  static std::array<DeviceInfo, kMaxDevices> infos;
  static std::array<std::once_flag, kMaxDevices> once;
  if (index < 0 || index >= kMaxDevices) refuse_unsupported("cuda:", index, " is past cuda:63");
  std::call_once(once[index], [index] {
    DeviceInfo& info = infos[index];
    info.num_sms = attribute(cudaDevAttrMultiProcessorCount, index);
    info.max_smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    info.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                              attribute(cudaDevAttrComputeCapabilityMinor, index);
  });
  return infos[index];
}

int driver_cuda_version() {
  int driver = 0;
  return cudaDriverGetVersion(&driver) == cudaSuccess ? driver : 0;
}

#else

const DeviceInfo& device_info(int) {
  static const DeviceInfo none;
  return none;
}

int driver_cuda_version() { return 0; }

#endif

}  // namespace flash_cuda
