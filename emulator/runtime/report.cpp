// What a failure says: kernel, block, warp, PTX and source line, what was waited for, and the
// command that shows it again.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "machine.h"

namespace px {

std::string demangle(char const* name) {
  int status = 0;
  char* s = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string out = status == 0 ? s : name;
  free(s);
  return out;
}

std::string Settings::describe() const {
  char const* names[] = {"eager", "lazy", "random"};
  std::string s = std::string("policy=") + names[int(policy)] + ",seed=" + std::to_string(seed) +
                  ",sms=" + std::to_string(num_sms);
  if (race_check) s += ",race=1";
  if (!proxy_check) s += ",proxy=0";
  if (tmem_load_at_issue) s += ",tmem_ld=issue";
  if (tmem_store_at_issue) s += ",tmem_st=issue";
  return s;
}

static std::string triple(uint32_t const v[3]) {
  return "(" + std::to_string(v[0]) + "," + std::to_string(v[1]) + "," + std::to_string(v[2]) + ")";
}

namespace {
// A .sites file: "S text" lines are numbered from 0, "F name" starts a function, and
// "ptx_line text_number" lines are its instructions.
struct SitesFile {
  std::vector<std::string> texts;
  std::map<std::string, std::vector<std::pair<int, int>>> functions;
  explicit SitesFile(char const* path) {
    std::ifstream in(path);
    std::vector<std::pair<int, int>>* rows = nullptr;
    for (std::string line; std::getline(in, line);) {
      if (line.rfind("S ", 0) == 0) {
        texts.push_back(line.substr(2));
      } else if (line.rfind("F ", 0) == 0) {
        rows = &functions[line.substr(2)];
      } else if (rows) {
        int a = 0, b = 0;
        sscanf(line.c_str(), "%d %d", &a, &b);
        rows->emplace_back(a, b);
      }
    }
  }
};
}  // namespace

Site site_of(FunctionInfo const* f, int at) {
  static std::map<std::string, std::unique_ptr<SitesFile>> files;
  if (!f) return {};
  auto& file = files[f->sites_file];
  if (!file) file = std::make_unique<SitesFile>(f->sites_file);
  auto const it = file->functions.find(f->name);
  if (it == file->functions.end() || size_t(at) >= it->second.size()) return {};
  auto const [line, text] = it->second[size_t(at)];
  return {line, size_t(text) < file->texts.size() ? file->texts[size_t(text)] : ""};
}

static std::string site_text(FunctionInfo const* f, int at, std::string const& indent) {
  Site const s = site_of(f, at);
  if (!s.ptx_line) return "";
  std::string out = indent + "PTX       " + f->ptx_file + ":" + std::to_string(s.ptx_line) + "\n";
  if (!s.frames.empty()) out += indent + "source    " + s.frames + "\n";
  return out;
}

static std::string waiting_text(Thread const& t) {
  AsyncState const& a = *t.async;
  if (!*a.waiting_for) return "";
  std::string out = a.waiting_for;
  if (a.waiting_barrier) {
    char address[32];
    uint64_t const offset = uint64_t(a.waiting_barrier - t.arena);
    snprintf(address, sizeof address, " shared+0x%x", unsigned(offset & (kCtaStride - 1)));
    out += address;
    if (offset >> kCtaShift != t.rank) out += " of rank " + std::to_string(offset >> kCtaShift);
    out += ", parity " + std::to_string(a.waiting_parity) + "; it has " +
           mbarrier_text(a.waiting_barrier);
  }
  return out;
}

std::string describe_thread(Thread const& t, std::string const& indent) {
  std::string out = indent + "block     " + triple(t.ctaid) + " of grid " + triple(t.nctaid);
  if (t.cluster_size > 1) out += ", rank " + std::to_string(t.rank) + " in its cluster";
  out += "\n" + indent + "thread    warp " + std::to_string(t.warp_id) + ", lane " +
         std::to_string(t.lane) + "\n";
  out += site_text(t.function, t.at, indent);
  std::string const waiting = waiting_text(t);
  if (!waiting.empty()) out += indent + "waits for " + waiting + "\n";
  return out;
}

static std::string reproduce_text() {
  std::string out = "  again     FLASH_CUDA_EMULATOR=" + M.settings.describe();
  char const* kernel = getenv("FLASH_CUDA_KERNEL");
  if (char const* test = getenv("PYTEST_CURRENT_TEST")) {
    std::string name = test;
    size_t const end = name.rfind(" (");
    out += " python -m pytest '" + name.substr(0, end) + "'";
    if (kernel) out += std::string(" --backend ") + kernel;
  } else if (kernel) {
    out += std::string(" FLASH_CUDA_KERNEL=") + kernel + " <the command that ran this>";
  } else {
    out += " <the command that ran this>";
  }
  return out;
}

std::string failure_text(Thread const* t, int at, std::string const& what) {
  std::string out = "emulated kernel failed: " + what + "\n  kernel    " +
                    demangle(M.kernel->function->name) + "\n";
  if (t) {
    const_cast<Thread*>(t)->at = at;
    out += describe_thread(*t, "  ");
  }
  return out + reproduce_text();
}

std::string deadlock_text(char const* what) {
  std::string out = std::string("deadlock in an emulated kernel: ") + what + "\n  kernel    " +
                    demangle(M.kernel->function->name) + "\n";
  struct Place {
    Thread* first;
    int lanes = 0;
  };
  std::map<std::string, Place> places;
  for (auto& c : M.clusters)
    for (auto& t : c->threads) {
      if (t->async->state == State::kExited) continue;
      std::string key = triple(t->ctaid);
      key += "/" + std::to_string(1000 + t->warp_id) + "/" + std::to_string(t->at);
      key += t->async->waiting_for;
      Place& p = places[key];
      if (!p.lanes++) p.first = t.get();
    }
  int shown = 0;
  for (auto& [key, place] : places) {
    if (++shown > 24) {
      out += "  ... and " + std::to_string(places.size() - 24) + " more places\n";
      break;
    }
    out += "  " + std::to_string(place.lanes) + (place.lanes == 1 ? " lane:\n" : " lanes:\n");
    out += describe_thread(*place.first, "    ");
  }
  return out + reproduce_text();
}

void warn(Thread& t, int at, char const* what) {
  std::string const key = std::string(what) + ":" + t.function->name + std::to_string(at);
  if (!M.warned.insert(key).second) return;
  int const old = t.at;
  t.at = at;
  std::string text = std::string("emulator warning: ") + what + "\n  kernel    " +
                     demangle(M.kernel->function->name) + "\n" + describe_thread(t, "  ");
  t.at = old;
  fprintf(stderr, "%s", text.c_str());
  M.warnings.push_back(std::move(text));
}

}  // namespace px
