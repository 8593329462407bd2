// 8-bit floating point, and truncation to float16.
#include "numbers.h"

#include <algorithm>

namespace px {
namespace {

uint8_t to_fp8(float x, int exponent_bits, int mantissa_bits, float largest, uint8_t largest_code) {
  uint8_t const sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return uint8_t(sign | 0x7f);
  float const a = std::fabs(x);
  if (a >= largest) return uint8_t(sign | largest_code);  // satfinite
  int const bias = (1 << (exponent_bits - 1)) - 1;
  int e;
  std::frexp(a, &e);
  e = std::max(e - 1, 1 - bias);
  int const m = int(std::nearbyint(std::ldexp(a, mantissa_bits - e)));
  int const one = 1 << mantissa_bits;
  return uint8_t(sign | (m >= one ? ((e + bias) << mantissa_bits) + (m - one) : m));
}

float from_fp8(uint8_t v, int exponent_bits, int mantissa_bits, bool has_infinity) {
  int const bias = (1 << (exponent_bits - 1)) - 1;
  int const e = (v & 0x7f) >> mantissa_bits, m = v & ((1 << mantissa_bits) - 1);
  int const one = 1 << mantissa_bits;
  float r;
  if (!has_infinity && (v & 0x7f) == 0x7f)
    r = std::numeric_limits<float>::quiet_NaN();
  else if (has_infinity && e == (1 << exponent_bits) - 1)
    r = m ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  else
    r = e ? std::ldexp(float(one + m), e - bias - mantissa_bits)
          : std::ldexp(float(m), 1 - bias - mantissa_bits);
  return v & 0x80 ? -r : r;
}

struct Fp8Tables {
  float e4m3[256], e5m2[256];
  Fp8Tables() {
    for (int i = 0; i < 256; ++i) {
      e4m3[i] = from_fp8(uint8_t(i), 4, 3, false);
      e5m2[i] = from_fp8(uint8_t(i), 5, 2, true);
    }
  }
};
Fp8Tables const tables;

}  // namespace

uint8_t to_e4m3(float x) { return to_fp8(x, 4, 3, 448.f, 0x7e); }
uint8_t to_e5m2(float x) { return to_fp8(x, 5, 2, 57344.f, 0x7b); }
float cvt_e4m3(uint8_t v) { return tables.e4m3[v]; }
float cvt_e5m2(uint8_t v) { return tables.e5m2[v]; }

uint16_t to_f16_rz(float x) {
  uint16_t h = to_f16_rn(x);
  if (std::fabs(cvt_f16(h)) > std::fabs(x)) --h;
  return h;
}

}  // namespace px
