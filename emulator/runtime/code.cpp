// Code of kernels that are compiled when they are first launched.
//
// Beside the library NAME.so lies NAME.kernels: for each kernel its object and the command that
// makes it. The object is linked against this library, so that it calls this runtime.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "machine.h"

namespace px {
namespace {

struct Recipe {
  std::string object, command;
};

// Lines of "kernel<TAB>object<TAB>command".
Recipe recipe_of(std::string const& kernel) {
  Dl_info self{};
  dladdr(reinterpret_cast<void*>(&code_of), &self);
  std::string path = self.dli_fname ? self.dli_fname : "";
  path = path.substr(0, path.rfind(".so")) + ".kernels";
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    size_t const a = line.find('\t'), b = line.find('\t', a + 1);
    if (b != std::string::npos && line.compare(0, a, kernel) == 0)
      return {line.substr(a + 1, b - a - 1), line.substr(b + 1)};
  }
  throw EmulatorError("emulator: " + path + " does not say how to compile " + kernel);
}

// One process compiles, others wait for it.
void compile(std::string const& kernel, Recipe const& r) {
  int const lock = open((r.object + ".lock").c_str(), O_CREAT | O_RDWR, 0666);
  if (lock >= 0) flock(lock, LOCK_EX);
  bool done = access(r.object.c_str(), F_OK) == 0;
  if (!done) {
    fprintf(stderr, "emulator: compiling %s\n", kernel.c_str());
    done = system(r.command.c_str()) == 0;
  }
  if (lock >= 0) close(lock);
  if (!done) throw EmulatorError("emulator: " + kernel + " does not compile: " + r.command);
}

}  // namespace

KernelFn code_of(KernelInfo const& kernel) {
  static std::unordered_map<KernelInfo const*, KernelFn> loaded;
  if (kernel.fn) return kernel.fn;
  KernelFn& fn = loaded[&kernel];
  if (fn) return fn;
  Recipe const r = recipe_of(kernel.code);
  if (access(r.object.c_str(), F_OK) != 0) compile(kernel.code, r);
  void* const object = dlopen(r.object.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const symbol = object ? dlsym(object, "flash_cuda_emulated_kernel") : nullptr;
  if (!symbol) {
    loaded.erase(&kernel);
    throw EmulatorError(std::string("emulator: ") + dlerror());
  }
  return fn = *static_cast<KernelFn*>(symbol);
}

}  // namespace px
