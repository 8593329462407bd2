// Arithmetic of PTX as plain functions: conversions, integer oddities, packed halves, atomics.
//
// Floating point is IEEE with round to nearest unless the instruction names another rounding; .ftz
// and the error of approximate functions are not modelled (see README.md, "What is not modelled").
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace px {

inline float f(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
inline uint32_t b(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline double dd(uint64_t u) {
  double x;
  memcpy(&x, &u, 8);
  return x;
}
inline uint64_t bd(double x) {
  uint64_t u;
  memcpy(&u, &x, 8);
  return u;
}
template <class V>
inline V rd(void const* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void wr(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

inline float cvt_bf16(uint16_t h) { return f(uint32_t(h) << 16); }
#ifdef __aarch64__  // g++ has known _Float16 there since version 13 only
using Half = __fp16;
#else
using Half = _Float16;
#endif
inline float cvt_f16(uint16_t h) {
  Half x;
  memcpy(&x, &h, 2);
  return float(x);
}
inline uint16_t to_f16_rn(float x) {
  Half h = Half(x);
  uint16_t r;
  memcpy(&r, &h, 2);
  return r;
}
inline uint16_t to_bf16_rn(float x) {
  uint32_t u = b(x);
  if (std::isnan(x)) return 0x7fff;
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline uint16_t to_bf16_rz(float x) { return std::isnan(x) ? 0x7fff : uint16_t(b(x) >> 16); }
#pragma GCC visibility push(default)
uint16_t to_f16_rz(float x);
uint8_t to_e4m3(float x);
uint8_t to_e5m2(float x);
float cvt_e4m3(uint8_t);
float cvt_e5m2(uint8_t);
#pragma GCC visibility pop
inline uint32_t to_tf32(float x) { return (b(x) + 0x1000) & 0xffffe000u; }
inline uint32_t pk(uint16_t hi, uint16_t lo) { return uint32_t(hi) << 16 | lo; }
inline float relu(float x) { return x > 0 ? x : 0.f; }
inline uint32_t cvt2_bf16x2_rn(float h, float l) { return pk(to_bf16_rn(h), to_bf16_rn(l)); }
inline uint32_t cvt2_bf16x2_rz(float h, float l) { return pk(to_bf16_rz(h), to_bf16_rz(l)); }
inline uint32_t cvt2_f16x2_rn(float h, float l) { return pk(to_f16_rn(h), to_f16_rn(l)); }
inline uint32_t cvt2_f16x2_rz(float h, float l) { return pk(to_f16_rz(h), to_f16_rz(l)); }
inline uint32_t cvt2_bf16x2_rn_relu(float h, float l) { return cvt2_bf16x2_rn(relu(h), relu(l)); }
inline uint32_t cvt2_f16x2_rn_relu(float h, float l) { return cvt2_f16x2_rn(relu(h), relu(l)); }
inline uint16_t cvt2_e4m3x2_rn(float h, float l) { return uint16_t(to_e4m3(h) << 8 | to_e4m3(l)); }
inline uint16_t cvt2_e5m2x2_rn(float h, float l) { return uint16_t(to_e5m2(h) << 8 | to_e5m2(l)); }
inline uint32_t cvt2_f16x2_e4m3x2(uint16_t v) {
  return pk(to_f16_rn(cvt_e4m3(v >> 8)), to_f16_rn(cvt_e4m3(uint8_t(v))));
}
inline uint32_t cvt2_f16x2_e5m2x2(uint16_t v) {
  return pk(to_f16_rn(cvt_e5m2(v >> 8)), to_f16_rn(cvt_e5m2(uint8_t(v))));
}

inline float sat01(float x) { return x > 1 ? 1.f : x > 0 ? x : 0.f; }
inline float fmax(float a, float c) {
  return std::isnan(a) ? c : std::isnan(c) ? a : a > c ? a : c;
}
inline float fmin(float a, float c) {
  return std::isnan(a) ? c : std::isnan(c) ? a : a < c ? a : c;
}
inline float fmax_nan(float a, float c) {
  return std::isnan(a) || std::isnan(c) ? f(0x7fffffff) : a > c ? a : c;
}
inline float fmin_nan(float a, float c) {
  return std::isnan(a) || std::isnan(c) ? f(0x7fffffff) : a < c ? a : c;
}
template <class V>
inline V imax(V a, V c) {
  return a > c ? a : c;
}
template <class V>
inline V imin(V a, V c) {
  return a < c ? a : c;
}
inline float xabs(float x) { return std::fabs(x); }
inline double xabs(double x) { return std::fabs(x); }
inline int32_t xabs(int32_t x) { return x < 0 ? -x : x; }
inline int64_t xabs(int64_t x) { return x < 0 ? -x : x; }
inline float m_ex2(float x) { return std::exp2(x); }
inline float m_lg2(float x) { return std::log2(x); }
inline float m_rcp(float x) { return 1.f / x; }
inline double m_rcp(double x) { return 1. / x; }
inline float m_sqrt(float x) { return std::sqrt(x); }
inline double m_sqrt(double x) { return std::sqrt(x); }
inline float m_rsqrt(float x) { return 1.f / std::sqrt(x); }
inline float m_tanh(float x) { return std::tanh(x); }
inline float m_sin(float x) { return std::sin(x); }
inline float m_cos(float x) { return std::cos(x); }
inline float rnd_rni(float x) { return std::nearbyint(x); }
inline float rnd_rzi(float x) { return std::trunc(x); }
inline float rnd_rmi(float x) { return std::floor(x); }
inline float rnd_rpi(float x) { return std::ceil(x); }
inline double rnd_rni(double x) { return std::nearbyint(x); }
inline double rnd_rzi(double x) { return std::trunc(x); }
inline double rnd_rmi(double x) { return std::floor(x); }
inline double rnd_rpi(double x) { return std::ceil(x); }
template <class I, class F>
inline I f2i(F x) {
  if (std::isnan(x)) return 0;
  if (double(x) >= double(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  if (double(x) <= double(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  return I(x);
}
template <class I, class S>
inline I isat(S x) {
  if (__int128(x) > __int128(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  if (__int128(x) < __int128(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  return I(x);
}
template <class V>
inline V idiv(V a, V c) {
  return c == 0 ? V(-1) : V(a / c);
}
template <class V>
inline V irem(V a, V c) {
  return c == 0 ? a : V(a % c);
}
inline uint32_t mulhi(uint32_t a, uint32_t c) { return uint32_t((uint64_t(a) * c) >> 32); }
inline int32_t mulhi(int32_t a, int32_t c) { return int32_t((int64_t(a) * c) >> 32); }
inline uint64_t mulhi(uint64_t a, uint64_t c) { return uint64_t(((unsigned __int128)a * c) >> 64); }
inline int64_t mulhi(int64_t a, int64_t c) { return int64_t(((__int128)a * c) >> 64); }
template <class V>
inline V xshl(V a, uint32_t s) {
  return s >= sizeof(V) * 8 ? V(0) : V(a << s);
}
template <class V>
inline V xshr(V a, uint32_t s) {
  if (s >= sizeof(V) * 8) return std::is_signed<V>::value && a < 0 ? V(-1) : V(0);
  return V(a >> s);
}
inline uint32_t shf_l_wrap(uint32_t lo, uint32_t hi, uint32_t s) {
  s &= 31;
  return s ? (hi << s) | (lo >> (32 - s)) : hi;
}
inline uint32_t shf_r_wrap(uint32_t lo, uint32_t hi, uint32_t s) {
  s &= 31;
  return s ? (lo >> s) | (hi << (32 - s)) : lo;
}
inline uint32_t shf_l_clamp(uint32_t lo, uint32_t hi, uint32_t s) {
  return s >= 32 ? lo : shf_l_wrap(lo, hi, s);
}
inline uint32_t shf_r_clamp(uint32_t lo, uint32_t hi, uint32_t s) {
  return s >= 32 ? hi : shf_r_wrap(lo, hi, s);
}
inline uint32_t lop3(uint32_t a, uint32_t c, uint32_t d, uint32_t t) {
  uint32_t r = 0;
  for (int i = 0; i < 8; ++i)
    if (t >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? c : ~c) & (i & 1 ? d : ~d);
  return r;
}
inline uint32_t prmt(uint32_t a, uint32_t c, uint32_t sel) {
  uint64_t v = uint64_t(c) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t s = sel >> (4 * i) & 15, by = uint32_t(v >> (8 * (s & 7))) & 255;
    if (s & 8) by = by & 128 ? 255 : 0;
    r |= by << (8 * i);
  }
  return r;
}
template <class V>
inline V bfe(V a, uint32_t pos, uint32_t len) {
  using U = std::make_unsigned_t<V>;
  pos &= 255;
  len &= 255;
  uint32_t const n = sizeof(V) * 8;
  if (!len) return 0;
  U r = pos >= n ? (std::is_signed<V>::value && a < 0 ? U(-1) : U(0)) : U(a >> pos);
  if (len >= n) return V(r);
  U m = (U(1) << len) - 1;
  r &= m;
  if (std::is_signed<V>::value && (r >> (len - 1) & 1)) r |= ~m;
  return V(r);
}
template <class U>
inline U bfi(U a, U base, uint32_t pos, uint32_t len) {
  uint32_t const n = sizeof(U) * 8;
  pos &= 255;
  len &= 255;
  if (!len || pos >= n) return base;
  U m = (len >= n ? U(-1) : (U(1) << len) - 1) << pos;
  return (base & ~m) | ((a << pos) & m);
}
inline uint32_t clz32(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline uint32_t clz64(uint64_t x) { return x ? __builtin_clzll(x) : 64; }
inline uint32_t brev(uint32_t x) {
  uint32_t r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}

#define PX_H(name, expr1, ty, C, D)                                                              \
  inline uint16_t v_##name##_##ty(uint16_t a_, uint16_t c_) {                                    \
    float a = C(a_), c = C(c_);                                                                  \
    return D(expr1);                                                                             \
  }                                                                                              \
  inline uint32_t v_##name##_##ty##x2(uint32_t a_, uint32_t c_) {                                \
    return pk(v_##name##_##ty(a_ >> 16, c_ >> 16), v_##name##_##ty(uint16_t(a_), uint16_t(c_))); \
  }
#define PX_HF(ty, C, D)                                                                            \
  PX_H(add, a + c, ty, C, D)                                                                       \
  PX_H(sub, a - c, ty, C, D)                                                                       \
  PX_H(mul, a* c, ty, C, D)                                                                        \
  PX_H(max, fmax(a, c), ty, C, D)                                                                  \
  PX_H(min, fmin(a, c), ty, C, D) inline uint16_t v_fma_##ty(uint16_t a, uint16_t c, uint16_t d) { \
    return D(float(double(C(a)) * C(c) + C(d)));                                                   \
  }                                                                                                \
  inline uint32_t v_fma_##ty##x2(uint32_t a, uint32_t c, uint32_t d) {                             \
    return pk(v_fma_##ty(a >> 16, c >> 16, d >> 16),                                               \
              v_fma_##ty(uint16_t(a), uint16_t(c), uint16_t(d)));                                  \
  }                                                                                                \
  inline uint16_t v_ex2_##ty(uint16_t a) { return D(std::exp2(C(a))); }                            \
  inline uint32_t v_ex2_##ty##x2(uint32_t a) {                                                     \
    return pk(v_ex2_##ty(a >> 16), v_ex2_##ty(uint16_t(a)));                                       \
  }                                                                                                \
  inline uint16_t v_tanh_##ty(uint16_t a) { return D(std::tanh(C(a))); }                           \
  inline uint32_t v_tanh_##ty##x2(uint32_t a) {                                                    \
    return pk(v_tanh_##ty(a >> 16), v_tanh_##ty(uint16_t(a)));                                     \
  }
PX_HF(f16, cvt_f16, to_f16_rn)
PX_HF(bf16, cvt_bf16, to_bf16_rn)
inline uint64_t p2(float lo, float hi) { return uint64_t(b(hi)) << 32 | b(lo); }
inline float lo2(uint64_t v) { return f(uint32_t(v)); }
inline float hi2(uint64_t v) { return f(uint32_t(v >> 32)); }
inline uint64_t v_add_f32x2(uint64_t a, uint64_t c) { return p2(lo2(a) + lo2(c), hi2(a) + hi2(c)); }
inline uint64_t v_sub_f32x2(uint64_t a, uint64_t c) { return p2(lo2(a) - lo2(c), hi2(a) - hi2(c)); }
inline uint64_t v_mul_f32x2(uint64_t a, uint64_t c) { return p2(lo2(a) * lo2(c), hi2(a) * hi2(c)); }
inline uint64_t v_fma_f32x2(uint64_t a, uint64_t c, uint64_t d) {
  return p2(__builtin_fmaf(lo2(a), lo2(c), lo2(d)), __builtin_fmaf(hi2(a), hi2(c), hi2(d)));
}

// Directed rounding: `volatile` keeps the operation between the two changes of the mode.
template <class F, class Op>
inline F rounded(int mode, F a, F c, F d, Op op) {
  int const old = std::fegetround();
  std::fesetround(mode);
  F volatile va = a, vc = c, vd = d;
  F volatile r = op(va, vc, vd);
  std::fesetround(old);
  return r;
}
#define PX_ROUNDED(name, expr)                                \
  template <class F>                                          \
  inline F name(int mode, F a, F c, F d = 0) {                \
    return rounded<F>(mode, a, c, d, [](F x, F y, F z) -> F { \
      (void)y, (void)z;                                       \
      return expr;                                            \
    });                                                       \
  }
PX_ROUNDED(rounded_add, x + y)
PX_ROUNDED(rounded_sub, x - y)
PX_ROUNDED(rounded_mul, x* y)
PX_ROUNDED(rounded_div, x / y)
PX_ROUNDED(rounded_fma, std::fma(x, y, z))
#undef PX_ROUNDED

inline float rounded_double_to_float(int mode, double x) {
  int const old = std::fegetround();
  std::fesetround(mode);
  double volatile v = x;
  float volatile r = float(v);
  std::fesetround(old);
  return r;
}

template <class V>
inline V at_add(void* p, V v) {
  V o = rd<V>(p);
  wr<V>(p, V(o + v));
  return o;
}
template <class V>
inline V at_min(void* p, V v) {
  V o = rd<V>(p);
  wr<V>(p, v < o ? v : o);
  return o;
}
template <class V>
inline V at_max(void* p, V v) {
  V o = rd<V>(p);
  wr<V>(p, v > o ? v : o);
  return o;
}
template <class V>
inline V at_and(void* p, V v) {
  V o = rd<V>(p);
  wr<V>(p, V(o & v));
  return o;
}
template <class V>
inline V at_or(void* p, V v) {
  V o = rd<V>(p);
  wr<V>(p, V(o | v));
  return o;
}
template <class V>
inline V at_xor(void* p, V v) {
  V o = rd<V>(p);
  wr<V>(p, V(o ^ v));
  return o;
}
template <class V>
inline V at_exch(void* p, V v) {
  V o = rd<V>(p);
  wr<V>(p, v);
  return o;
}
template <class V>
inline V at_cas(void* p, V c, V v) {
  V o = rd<V>(p);
  if (o == c) wr<V>(p, v);
  return o;
}
template <class V>
inline V at_inc(void* p, V v) {
  V o = rd<V>(p);
  wr<V>(p, o >= v ? V(0) : V(o + 1));
  return o;
}
template <class V>
inline V at_dec(void* p, V v) {
  V o = rd<V>(p);
  wr<V>(p, o == 0 || o > v ? v : V(o - 1));
  return o;
}
inline void at_add_f16x2(void* p, uint32_t v) { wr<uint32_t>(p, v_add_f16x2(rd<uint32_t>(p), v)); }
inline void at_add_bf16x2(void* p, uint32_t v) {
  wr<uint32_t>(p, v_add_bf16x2(rd<uint32_t>(p), v));
}
inline void at_add_f16(void* p, uint16_t v) { wr<uint16_t>(p, v_add_f16(rd<uint16_t>(p), v)); }
inline void at_add_bf16(void* p, uint16_t v) { wr<uint16_t>(p, v_add_bf16(rd<uint16_t>(p), v)); }

}  // namespace px
