// ldmatrix, stmatrix, movmatrix and mma.sync: who holds which element.
#include "machine.h"

namespace px {

float element_to_float(Element e, uint32_t bits) {
  switch (e) {
    case Element::kF16:
      return cvt_f16(uint16_t(bits));
    case Element::kBF16:
      return cvt_bf16(uint16_t(bits));
    case Element::kE4M3:
      return cvt_e4m3(uint8_t(bits));
    case Element::kE5M2:
      return cvt_e5m2(uint8_t(bits));
    case Element::kTF32:
      return f(bits & 0xffffe000u);
    default:
      return f(bits);
  }
}

namespace {
struct MatrixArg {
  uint32_t address;
  void* const* regs;
};
MatrixArg& matrix_arg(Collective& c, int lane) { return *static_cast<MatrixArg*>(c.arg[lane]); }
void require_whole_warp(Thread& t, int at, Collective const& c) {
  if (c.arrived != kAllLanes) t.fail(at, "a warp-wide matrix instruction needs all 32 lanes");
}
}  // namespace

// Lane l supplies the address of row l % 8 of matrix l / 8; it receives elements (l / 4,
// 2 (l % 4)) and the next one of each matrix, or of its transpose.
void Thread::ldmatrix(int where, int count, bool transpose, void* const* d, uint32_t address) {
  MatrixArg arg{address, d};
  collective(
      *this, where, kAligned | uint64_t(where), kAllLanes, &arg, "ldmatrix", [=](Collective& c) {
        require_whole_warp(*this, where, c);
        for (int m = 0; m < count; ++m) {
          uint16_t t[8][8];
          for (int r = 0; r < 8; ++r)
            memcpy(
                t[r],
                lane_of(*this, m * 8 + r)->load_shared(where, matrix_arg(c, m * 8 + r).address, 16),
                16);
          for (int l = 0; l < 32; ++l) {
            int const i = l / 4, j = 2 * (l % 4);
            if (void* q = matrix_arg(c, l).regs[m])
              *static_cast<uint32_t*>(q) =
                  transpose ? pk(t[j + 1][i], t[j][i]) : pk(t[i][j + 1], t[i][j]);
          }
        }
      });
}

void Thread::stmatrix(int where, int count, bool transpose, uint32_t address, void* const* s) {
  MatrixArg arg{address, s};
  collective(*this, where, kAligned | uint64_t(where), kAllLanes, &arg, "stmatrix",
             [=](Collective& c) {
               require_whole_warp(*this, where, c);
               for (int m = 0; m < count; ++m) {
                 uint16_t t[8][8];
                 for (int l = 0; l < 32; ++l) {
                   uint32_t const v = *static_cast<uint32_t*>(matrix_arg(c, l).regs[m]);
                   int const i = l / 4, j = 2 * (l % 4);
                   (transpose ? t[j][i] : t[i][j]) = uint16_t(v);
                   (transpose ? t[j + 1][i] : t[i][j + 1]) = uint16_t(v >> 16);
                 }
                 for (int r = 0; r < 8; ++r)
                   memcpy(lane_of(*this, m * 8 + r)
                              ->store_shared(where, matrix_arg(c, m * 8 + r).address, 16),
                          t[r], 16);
               }
             });
}

void Thread::movmatrix(int where, void* const* d, uint32_t v) {
  MatrixArg arg{v, d};
  collective(*this, where, kAligned | uint64_t(where), kAllLanes, &arg, "movmatrix",
             [=](Collective& c) {
               require_whole_warp(*this, where, c);
               uint16_t t[8][8];
               for (int l = 0; l < 32; ++l) {
                 uint32_t const x = matrix_arg(c, l).address;
                 t[l / 4][2 * (l % 4)] = uint16_t(x);
                 t[l / 4][2 * (l % 4) + 1] = uint16_t(x >> 16);
               }
               for (int l = 0; l < 32; ++l)
                 *static_cast<uint32_t*>(matrix_arg(c, l).regs[0]) =
                     pk(t[2 * (l % 4) + 1][l / 4], t[2 * (l % 4)][l / 4]);
             });
}

// One layout for all element sizes. A register holds E = 4 / size elements along k. Register r of
// A covers row lane / 4 + 8 (r % 2) and k from (r / 2) 4 E + (lane % 4) E; register r of B covers
// column lane / 4 and k from r 4 E + (lane % 4) E. C and D: registers 0, 1 hold columns
// 2 (lane % 4) and the next of row lane / 4, registers 2, 3 those of row lane / 4 + 8.
namespace {
struct MmaArg {
  void* const* d;
  uint32_t const *a, *b, *c;
};

uint32_t element_bytes(Element e) {
  if (e == Element::kF16 || e == Element::kBF16) return 2;
  return e == Element::kE4M3 || e == Element::kE5M2 ? 1 : 4;
}

template <int kBytes>
void unpack_operands(MmaArg const& q, int lane, int a_regs, Element ae, Element be, float (*a)[32],
                     float (*b)[8]) {
  constexpr int kPer = 4 / kBytes;
  int const g = lane / 4, t = lane % 4;
  for (int r = 0; r < a_regs; ++r)
    for (int e = 0; e < kPer; ++e)
      a[g + 8 * (r % 2)][(r / 2) * 4 * kPer + t * kPer + e] =
          element_to_float(ae, kBytes == 4 ? q.a[r] : q.a[r] >> (8 * kBytes * e));
  for (int r = 0; r < a_regs / 2; ++r)
    for (int e = 0; e < kPer; ++e)
      b[r * 4 * kPer + t * kPer + e][g] =
          element_to_float(be, kBytes == 4 ? q.b[r] : q.b[r] >> (8 * kBytes * e));
}
}  // namespace

void Thread::mma(int where, int a_regs, Element ae, Element be, bool f16_accumulator,
                 void* const* d, uint32_t const* av, uint32_t const* bv, uint32_t const* cv) {
  MmaArg arg{d, av, bv, cv};
  collective(
      *this, where, kAligned | uint64_t(where), kAllLanes, &arg, "mma.sync", [=](Collective& c) {
        require_whole_warp(*this, where, c);
        ++M.stats.matrix_ops;
        float a[16][32], b[32][8], acc[16][8];
        uint32_t const bytes = element_bytes(ae);
        for (int l = 0; l < 32; ++l) {
          MmaArg const& q = *static_cast<MmaArg*>(c.arg[l]);
          if (bytes == 2)
            unpack_operands<2>(q, l, a_regs, ae, be, a, b);
          else if (bytes == 1)
            unpack_operands<1>(q, l, a_regs, ae, be, a, b);
          else
            unpack_operands<4>(q, l, a_regs, ae, be, a, b);
          for (int h = 0; h < 4; ++h) {
            int const row = l / 4 + 8 * (h / 2), col = 2 * (l % 4) + h % 2;
            acc[row][col] =
                f16_accumulator ? cvt_f16(uint16_t(q.c[h / 2] >> (16 * (h % 2)))) : f(q.c[h]);
          }
        }
        int const k = a_regs / 2 * 4 * (4 / int(bytes));
        for (int i = 0; i < 16; ++i)
          for (int p = 0; p < k; ++p)
            for (int j = 0; j < 8; ++j) acc[i][j] += a[i][p] * b[p][j];
        for (int l = 0; l < 32; ++l) {
          MmaArg const& q = *static_cast<MmaArg*>(c.arg[l]);
          for (int h = 0; h < 2; ++h) {
            int const row = l / 4 + 8 * h, col = 2 * (l % 4);
            if (f16_accumulator) {
              *static_cast<uint32_t*>(q.d[h]) =
                  pk(to_f16_rn(acc[row][col + 1]), to_f16_rn(acc[row][col]));
            } else {
              *static_cast<uint32_t*>(q.d[2 * h]) = px::b(acc[row][col]);
              *static_cast<uint32_t*>(q.d[2 * h + 1]) = px::b(acc[row][col + 1]);
            }
          }
        }
      });
}

}  // namespace px
