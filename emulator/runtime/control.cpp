// Registered modules, settings, and the C functions that Python calls.
//
// Settings are "key=value" pairs separated by commas, first from the environment variable
// FLASH_CUDA_EMULATOR, later from flash_cuda_emulator_configure.
#include <algorithm>
#include <cstdlib>

#include "machine.h"

#define PX_EXPORT extern "C" __attribute__((visibility("default")))

namespace px {
namespace {

std::vector<ModuleInfo>& modules() {
  static std::vector<ModuleInfo> m;  // filled by static constructors
  return m;
}

// Names in the order of the enum; "name:site" plants at one site.
constexpr char const* kPlants[] = {"nothing",         "observe",    "bar_sync",     "syncwarp",
                                   "cp_wait",         "bulk_wait",  "wgmma_wait",   "wgmma_fence",
                                   "proxy_fence",     "init_fence", "thread_fence", "mbarrier_wait",
                                   "mbarrier_arrive", "parity",     "bytes",        "tmem_wait",
                                   "tcgen05_fence",   "commit",     "grid_wait"};

bool set_plant(Settings& s, std::string const& value) {
  size_t const colon = value.find(':');
  std::string const name = value.substr(0, colon);
  for (size_t i = 0; i < sizeof kPlants / sizeof *kPlants; ++i)
    if (name == kPlants[i]) {
      s.plant = Plant(i);
      s.plant_at = colon == std::string::npos ? -1 : atoi(value.c_str() + colon + 1);
      if (s.plant == Plant::kObserve) M.plantable.clear();
      return true;
    }
  return false;
}

bool set(Settings& s, std::string const& key, std::string const& value) {
  char* end = nullptr;
  uint64_t const number = strtoull(value.c_str(), &end, 0);
  bool const is_number = !value.empty() && *end == 0;
  if (key == "policy") {
    if (value == "eager")
      s.policy = Policy::kEager;
    else if (value == "lazy")
      s.policy = Policy::kLazy;
    else if (value == "random")
      s.policy = Policy::kRandom;
    else
      return false;
  } else if (key == "tmem_ld" || key == "tmem_st") {
    if (value != "issue" && value != "wait") return false;
    (key == "tmem_ld" ? s.tmem_load_at_issue : s.tmem_store_at_issue) = value == "issue";
  } else if (key == "plant") {
    return set_plant(s, value);
  } else if (!is_number) {
    return false;
  } else if (key == "seed")
    s.seed = number;
  else if (key == "sms" && number >= 1)
    s.num_sms = uint32_t(number);
  else if (key == "cc")
    s.compute_capability = uint32_t(number);
  else if (key == "race")
    s.race_check = number != 0;
  else if (key == "proxy")
    s.proxy_check = number != 0;
  else if (key == "tmem")
    s.tmem_strict = number != 0;
  else if (key == "stats")
    s.statistics = number != 0;
  else
    return false;
  return true;
}

std::string configure(std::string const& text) {
  Settings s = M.settings;
  for (size_t i = 0; i < text.size();) {
    size_t const end = std::min(text.find(',', i), text.size());
    std::string const pair = text.substr(i, end - i);
    size_t const eq = pair.find('=');
    if (eq == std::string::npos || !set(s, pair.substr(0, eq), pair.substr(eq + 1)))
      return "emulator setting not understood: '" + pair +
             "' (policy=eager|lazy|random, seed=N, sms=N, cc=N, race=0|1, proxy=0|1, tmem=0|1, "
             "tmem_ld=wait|issue, tmem_st=wait|issue, stats=0|1)";
    i = end + 1;
  }
  M.settings = s;
  return "";
}

std::string last_message;

}  // namespace

RegisterModule::RegisterModule(ModuleInfo const& module) { modules().push_back(module); }

KernelInfo const* find_kernel(char const* name) {
  for (ModuleInfo const& m : modules())
    for (uint32_t i = 0; i < m.num_kernels; ++i)
      if (!strcmp(m.kernels[i].function->name, name)) return &m.kernels[i];
  return nullptr;
}

// Device variables are taken back to their first values after a failure: what a launch that was
// cut short has left in them (a counter, a lock) must not fail the next one.
void reset_variables() {
  static std::vector<std::vector<uint8_t>> first;
  bool const fresh = first.empty();
  size_t k = 0;
  for (ModuleInfo const& m : modules())
    for (uint32_t i = 0; i < m.num_variables; ++i, ++k) {
      auto* p = static_cast<uint8_t*>(m.variables[i].address);
      if (fresh)
        first.emplace_back(p, p + m.variables[i].size);
      else
        std::copy(first[k].begin(), first[k].end(), p);
    }
  if (fresh) first.emplace_back();  // also known to be taken where there are none
}

VariableInfo const* find_variable(char const* name) {
  for (ModuleInfo const& m : modules())
    for (uint32_t i = 0; i < m.num_variables; ++i)
      if (!strcmp(m.variables[i].name, name)) return &m.variables[i];
  return nullptr;
}

bool is_variable(void const* p, uint32_t n) {
  for (ModuleInfo const& m : modules())
    for (uint32_t i = 0; i < m.num_variables; ++i) {
      uint64_t const from = uint64_t(p) - uint64_t(m.variables[i].address);
      if (from < m.variables[i].size && n <= m.variables[i].size - from) return true;
    }
  return false;
}

// Called by the stand-in CUDA runtime before the first launch or query.
void load_environment() {
  static bool const once = [] {
    if (char const* s = getenv("FLASH_CUDA_EMULATOR")) {
      std::string const error = configure(s);
      if (!error.empty()) throw EmulatorError(error);
    }
    return true;
  }();
  (void)once;
}

}  // namespace px

// Null, or what is wrong with `text`.
PX_EXPORT char const* flash_cuda_emulator_configure(char const* text) {
  try {
    px::load_environment();
    px::M.written = px::Written();  // what runs next is another program
    px::last_message = px::configure(text);
  } catch (std::exception const& e) {
    px::last_message = e.what();
  }
  return px::last_message.empty() ? nullptr : px::last_message.c_str();
}

PX_EXPORT char const* flash_cuda_emulator_settings() {
  px::last_message = px::M.settings.describe();
  return px::last_message.c_str();
}

// Warnings since the last call, or null.
PX_EXPORT char const* flash_cuda_emulator_take_warnings() {
  px::last_message.clear();
  for (std::string const& w : px::M.warnings) px::last_message += w;
  px::M.warnings.clear();
  px::M.warned.clear();
  return px::last_message.empty() ? nullptr : px::last_message.c_str();
}

// "name:site source line" of each place at which a mistake can be planted, seen since
// plant=observe.
PX_EXPORT char const* flash_cuda_emulator_plantable() {
  px::last_message.clear();
  for (auto const& [place, function] : px::M.plantable)
    px::last_message += std::string(px::kPlants[int(place.first)]) + ":" +
                        std::to_string(place.second) + " " +
                        px::site_of(function, place.second).frames + "\n";
  return px::last_message.c_str();
}

PX_EXPORT uint64_t flash_cuda_emulator_launches() { return px::M.stats.launches; }
PX_EXPORT double flash_cuda_emulator_seconds() { return px::M.stats.seconds; }
