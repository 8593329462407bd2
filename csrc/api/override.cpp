// The override, and the emulated libraries that one of its values asks for.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "api/check.h"
#include "api/dispatch.h"

namespace flash_cuda {

namespace {

constexpr const char* kAllowed =
    "sm80, sm90, sm100, cpu, emulated or emulated:ARCH (emulated:sm90)";

thread_local std::string thread_override;

const std::string& process_override() {
  static const std::string name = [] {
    const char* value = std::getenv("FLASH_CUDA_KERNEL");
    const std::string text(value ? value : "");
    parse_override(text);  // refuses what is no name, at each call that asks
    return text;
  }();
  return name;
}

// 90 for "sm90"; 0 for what is no folder.
int arch_of(const std::string& name) {
  for (int arch : {80, 90, 100}) {
    if (name == join("sm", arch)) return arch;
  }
  return 0;
}

struct EmulatedLibrary {
  std::string path;
  Folder folder;
  int num_sms;
};

std::mutex emulated_mutex;
std::vector<EmulatedLibrary>& emulated_libraries() {
  static auto* libraries = new std::vector<EmulatedLibrary>;  // outlives every thread
  return *libraries;
}

int arch_of(const KernelTable& table) {
  if (table.num_fwd > 0) return table.fwd[0].arch;
  if (table.num_bwd > 0) return table.bwd[0].arch;
  if (table.num_decode > 0) return table.decode[0].arch;
  return 80;  // the shared kernels alone
}

std::string built_text() {
  std::string text;
  for (const Folder& folder : compiled_folders()) {
    text += join(text.empty() ? "" : ", ", "sm", folder.arch);
  }
  return text.empty() ? "no kernels" : text;
}

}  // namespace

Override parse_override(const std::string& name) {
  Override result;
  if (name.empty()) return result;
  const std::string emulated = "emulated";
  if (name == "cpu") {
    result.kind = Override::Kind::kCpu;
  } else if (name == emulated) {
    result.kind = Override::Kind::kEmulated;
  } else if (name.rfind(emulated + ":", 0) == 0) {
    result.kind = Override::Kind::kEmulated;
    result.arch = arch_of(name.substr(emulated.size() + 1));
    if (result.arch == 0)
      refuse_value("the kernel override must be ", kAllowed, ", got '", name, "'");
  } else {
    result.kind = Override::Kind::kArch;
    result.arch = arch_of(name);
    if (result.arch == 0)
      refuse_value("the kernel override must be ", kAllowed, ", got '", name, "'");
  }
  return result;
}

std::string override_name() {
  return thread_override.empty() ? process_override() : thread_override;
}

std::string set_override(const std::string& name) {
  parse_override(name);
  std::string before = thread_override;
  thread_override = name;
  return before;
}

int load_emulated(const std::string& path, int num_sms) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) refuse_value("cannot load emulated kernels: ", dlerror());
  using GetTable = const KernelTable* (*)();
  const auto get_table = reinterpret_cast<GetTable>(dlsym(library, "flash_cuda_kernel_table"));
  if (!get_table) {
    refuse_value("'", path,
                 "' is no library of emulated kernels: it has no flash_cuda_kernel_table");
  }
  const KernelTable* table = get_table();
  if (num_sms < 1) refuse_value("num_sms must be at least 1, got ", num_sms);
  const Folder folder{arch_of(*table), table};
  unload_emulated(path);
  const std::lock_guard<std::mutex> lock(emulated_mutex);
  emulated_libraries().push_back({path, folder, num_sms});
  return folder.arch;
}

void unload_emulated(const std::string& path) {
  const std::lock_guard<std::mutex> lock(emulated_mutex);
  auto& libraries = emulated_libraries();  // not closed: a launch may be under way
  libraries.erase(std::remove_if(libraries.begin(), libraries.end(),
                                 [&](const EmulatedLibrary& l) { return l.path == path; }),
                  libraries.end());
}

Kernels kernels_for_gpu(const DeviceInfo& device, const TensorInfo& q) {
  Kernels kernels;
  kernels.device = device;
  const Override override = parse_override(override_name());
  if (override.kind == Override::Kind::kCpu || override.kind == Override::Kind::kEmulated) {
    refuse_unsupported("the kernel override '", override_name(), "' serves CPU tensors, got ",
                       q.name, " on ", device_text(q));
  }
  for (const Folder& folder : compiled_folders()) {
    if (!serves(folder.arch, device.compute_capability)) continue;
    kernels.take_shared(*folder.table);
    if (override.kind == Override::Kind::kNone || override.arch == folder.arch) {
      kernels.folders.push_back(folder);
    }
  }
  if (!kernels.folders.empty()) return kernels;
  if (compiled_folders().empty()) {
    refuse_unsupported(
        "flash_cuda was built without CUDA kernels and serves CPU tensors only. Build them in its "
        "source folder with: FLASH_CUDA_ARCHS=native pip install --no-build-isolation --no-deps "
        "--force-reinstall .");
  }
  if (override.kind == Override::Kind::kArch) {
    refuse_unsupported("the kernel override '", override_name(), "' does not serve ",
                       device_text(q), ", compute capability ",
                       capability_text(device.compute_capability), "; this build has ",
                       built_text());
  }
  refuse_unsupported("this build has ", built_text(), ", and none serves ", device_text(q),
                     ", compute capability ", capability_text(device.compute_capability),
                     ": build with FLASH_CUDA_ARCHS=native; cards before 8.0 are not supported");
}

Kernels emulated_kernels() {
  const Override override = parse_override(override_name());
  const std::lock_guard<std::mutex> lock(emulated_mutex);
  const auto& libraries = emulated_libraries();
  Kernels kernels;
  for (auto it = libraries.rbegin(); it != libraries.rend(); ++it) {
    kernels.take_shared(*it->folder.table);
    const bool wanted = override.arch == 0 || override.arch == it->folder.arch;
    if (!wanted || !kernels.folders.empty()) continue;
    kernels.device = typical_device(it->folder.arch);
    kernels.device.num_sms = it->num_sms;
    kernels.folders.push_back(it->folder);
  }
  if (!kernels.folders.empty()) return kernels;
  refuse_unsupported("emulated kernels of ",
                     override.arch ? join("sm", override.arch) : "any architecture",
                     " are not loaded; they come from emulator/ in a source checkout");
}

}  // namespace flash_cuda
