// printf and assert of device code.
#include <cstdio>
#include <string>

#include "machine.h"

namespace px {

void device_vprintf(Thread&, int, uint8_t* ret, uint8_t* format, uint8_t* args) {
  char const* s = reinterpret_cast<char const*>(rd<uint64_t>(format));
  auto* a = reinterpret_cast<uint8_t*>(rd<uint64_t>(args));
  size_t offset = 0;
  auto take = [&](size_t n) {
    offset = (offset + n - 1) / n * n;
    uint8_t* p = a + offset;
    offset += n;
    return p;
  };
  std::string out;
  for (; *s; ++s) {
    if (*s != '%') {
      out += *s;
      continue;
    }
    std::string spec = "%";
    int longs = 0;
    for (++s; *s && !strchr("diouxXeEfFgGcsp%", *s); ++s) {
      if (*s == 'l')
        ++longs;
      else
        spec += *s;
    }
    if (!*s) break;
    char buffer[512] = "";
    char const c = *s;
    if (c == '%')
      buffer[0] = '%', buffer[1] = 0;
    else if (strchr("eEfFgG", c))
      snprintf(buffer, sizeof buffer, (spec + c).c_str(), rd<double>(take(8)));
    else if (c == 's' || c == 'p')
      snprintf(buffer, sizeof buffer, (spec + c).c_str(),
               reinterpret_cast<char*>(rd<uint64_t>(take(8))));
    else if (longs)
      snprintf(buffer, sizeof buffer, (spec + "ll" + c).c_str(), rd<long long>(take(8)));
    else
      snprintf(buffer, sizeof buffer, (spec + c).c_str(), rd<int>(take(4)));
    out += buffer;
  }
  fputs(out.c_str(), stdout);
  wr<uint32_t>(ret, uint32_t(out.size()));
}

void device_assertfail(Thread& t, int at, uint8_t* message, uint8_t* file, uint8_t* line, uint8_t*,
                       uint8_t*) {
  std::string const text = std::string("device assertion: ") +
                           reinterpret_cast<char const*>(rd<uint64_t>(message)) + " (" +
                           reinterpret_cast<char const*>(rd<uint64_t>(file)) + ":" +
                           std::to_string(rd<uint32_t>(line)) + ")";
  t.fail(at, text.c_str());
}

}  // namespace px
