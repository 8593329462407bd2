// Which kernel serves a call: tables of compiled kernels, the override, and select(), a pure
// function over them.
#pragma once

#include <string>
#include <vector>

#include "api/args.h"
#include "common/kernel_table.h"

namespace flash_cuda {

struct DeviceInfo {
  int compute_capability = 0;  // 80, 86, 89, 90, 100, 103, 120
  int num_sms = 0;
  int max_smem_per_block = 0;  // bytes, with opt-in
};

// The kernels of one folder of csrc (arch 80 is csrc/sm80).
struct Folder {
  int arch = 0;
  const KernelTable* table = nullptr;
};

// A device, the folders that may serve it, newest first, and the kernels that all folders share.
// An override narrows the folders, not the shared kernels.
struct Kernels {
  DeviceInfo device;
  std::vector<Folder> folders;
  void (*combine)(const CombineParams&, cudaStream_t) = nullptr;
  void (*kv_append)(const KvAppendParams&, cudaStream_t) = nullptr;

  void take_shared(const KernelTable& table) {
    if (!combine) combine = table.combine;
    if (!kv_append) kv_append = table.kv_append;
  }
};

// True where code of csrc/smARCH runs: the mma.sync folder everywhere, the others on their own
// generation, which share no machine code.
bool serves(int arch, int compute_capability);

// The folders of this build, newest first.
const std::vector<Folder>& compiled_folders();

// ---- override: FLASH_CUDA_KERNEL, or set_override() for the calling thread

struct Override {
  enum class Kind { kNone, kArch, kCpu, kEmulated };
  Kind kind = Kind::kNone;
  int arch = 0;  // 0 with kEmulated: the library loaded last
};

// "", "sm90", "cpu", "emulated", "emulated:sm90"; refuses anything else.
Override parse_override(const std::string& name);
// Returns what was set before; "" goes back to FLASH_CUDA_KERNEL.
std::string set_override(const std::string& name);
std::string override_name();

// ---- emulated kernels: the table of a shared library, for CPU tensors

// Loads the library of one folder, whose kernels the emulator runs; returns its arch. The library
// lives as long as the process. The device that its kernels see has `num_sms` multiprocessors.
int load_emulated(const std::string& path, int num_sms);
// Its kernels serve no further call.
void unload_emulated(const std::string& path);

// The folders that may serve a tensor on a GPU, or (emulated) on the CPU, under the override.
// Refuses an override that does not fit or names what was not built.
Kernels kernels_for_gpu(const DeviceInfo& device, const TensorInfo& q);
Kernels emulated_kernels();

// ---- selection

// The first row that fits and does not refuse. Null if there is none; `reasons`, if given, then
// says why, a line a folder or kernel.
const FwdKernel* select_fwd(const Kernels& kernels, const FwdParams& params,
                            std::vector<std::string>* reasons = nullptr);
const FwdKernel* select_decode(const Kernels& kernels, const FwdParams& params,
                               std::vector<std::string>* reasons = nullptr);
const BwdKernel* select_bwd(const Kernels& kernels, const BwdParams& params,
                            std::vector<std::string>* reasons = nullptr);

// Throws Refusal: "no kernel serves this call on compute capability 9.0: ...".
[[noreturn]] void refuse_no_kernel(const Kernels& kernels, const std::vector<std::string>& reasons);

// "9.0" for 90, "12.0" for 120.
std::string capability_text(int compute_capability);
const char* name_of(DType dtype);
// What a device of this capability usually has, for questions about devices that are not here.
DeviceInfo typical_device(int compute_capability);

}  // namespace flash_cuda
