// Tensor maps and the tiled copies that use them: 1 to 5 dimensions, swizzles, fill of zeros
// outside the tensor, multicast, stores and reductions.
#include <algorithm>

#include "machine.h"

namespace px {
namespace {

constexpr uint32_t kMagic = 0x7a3d11ce;
// Bytes of an element, by CUtensorMapDataType.
constexpr uint32_t kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
constexpr Element kElementTypes[] = {Element::kB8,  Element::kB8,   Element::kU32, Element::kS32,
                                     Element::kU64, Element::kS64,  Element::kF16, Element::kF32,
                                     Element::kF64, Element::kBF16, Element::kF32, Element::kF32,
                                     Element::kF32};

struct TensorMap {
  uint64_t base, dims[5], strides[4];
  uint16_t box[5];
  uint8_t element_strides[5], dtype, rank, interleave, swizzle, oob;
  uint32_t magic;
};
static_assert(sizeof(TensorMap) <= 128, "larger than CUtensorMap");

TensorMap read_map(Thread& t, int at, uint64_t address, int rank, uint32_t shared) {
  if (address & 63) t.fail(at, "the tensor map is not 64-byte aligned");
  TensorMap const m = rd<TensorMap>(reinterpret_cast<void const*>(address));
  if (m.magic != kMagic) t.fail(at, "not a tensor map");
  if (m.rank != rank) t.fail(at, "the tensor map has another rank than the instruction");
  if (m.interleave) t.fail(at, "interleaved tensor maps are not modelled");
  if (m.swizzle > 3) t.fail(at, "this swizzle mode is not modelled");
  for (int i = 0; i < rank; ++i)
    if (m.element_strides[i] != 1) t.fail(at, "element strides are not modelled");
  if (shared & 127) t.fail(at, "the shared address of a tensor copy must be 128-byte aligned");
  return m;
}

// Calls row(offset in the box, bytes of a row, global address of the first byte inside, bytes
// before it in the row, bytes inside) for each innermost row; returns the bytes of the box.
template <class F>
uint32_t walk(TensorMap const& m, int32_t const* c, F row) {
  uint32_t const size = kElementBytes[m.dtype];
  uint32_t box[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < m.rank; ++i) box[i] = m.box[i];
  uint32_t const row_bytes = box[0] * size;
  int64_t first = c[0] < 0 ? -int64_t(c[0]) : 0;
  int64_t last = std::min(int64_t(m.dims[0]) - c[0], int64_t(box[0]));
  if (last < first) first = last = 0;
  uint32_t offset = 0;
  uint32_t i[5] = {};
  for (i[4] = 0; i[4] < box[4]; ++i[4])
    for (i[3] = 0; i[3] < box[3]; ++i[3])
      for (i[2] = 0; i[2] < box[2]; ++i[2])
        for (i[1] = 0; i[1] < box[1]; ++i[1], offset += row_bytes) {
          int64_t address = int64_t(m.base) + (int64_t(c[0]) + first) * size;
          bool inside = true;
          for (int d = 1; d < m.rank; ++d) {
            int64_t const x = int64_t(c[d]) + i[d];
            inside &= x >= 0 && x < int64_t(m.dims[d]);
            address += x * int64_t(m.strides[d - 1]);
          }
          row(offset, row_bytes, reinterpret_cast<uint8_t*>(address), uint32_t(first) * size,
              inside ? uint32_t(last - first) * size : 0);
        }
  return offset;
}

uint32_t swizzled(TensorMap const& m, uint32_t a) {
  uint32_t const mask = m.swizzle == 3 ? 7 : m.swizzle == 2 ? 3 : m.swizzle == 1 ? 1 : 0;
  return a ^ ((a >> 7 & mask) << 4);
}

template <class V, class F>
void reduce_each(uint8_t* g, uint8_t const* s, uint32_t n, F op) {
  for (uint32_t i = 0; i + sizeof(V) <= n; i += sizeof(V))
    wr<V>(g + i, V(op(rd<V>(g + i), rd<V>(s + i))));
}

template <class V>
bool reduce_numbers(Reduction r, uint8_t* g, uint8_t const* s, uint32_t n) {
  switch (r) {
    case Reduction::kAdd:
      reduce_each<V>(g, s, n, [](V a, V c) { return a + c; });
      return true;
    case Reduction::kMin:
      reduce_each<V>(g, s, n, [](V a, V c) { return std::min(a, c); });
      return true;
    case Reduction::kMax:
      reduce_each<V>(g, s, n, [](V a, V c) { return std::max(a, c); });
      return true;
    default:
      return false;
  }
}

template <class V>
bool reduce_bits(Reduction r, uint8_t* g, uint8_t const* s, uint32_t n) {
  switch (r) {
    case Reduction::kAnd:
      reduce_each<V>(g, s, n, [](V a, V c) { return a & c; });
      return true;
    case Reduction::kOr:
      reduce_each<V>(g, s, n, [](V a, V c) { return a | c; });
      return true;
    case Reduction::kXor:
      reduce_each<V>(g, s, n, [](V a, V c) { return a ^ c; });
      return true;
    default:
      return reduce_numbers<V>(r, g, s, n);
  }
}

bool reduce_halves(Reduction r, bool bf16, uint8_t* g, uint8_t const* s, uint32_t n) {
  auto with = [&](auto f16, auto b16) {
    reduce_each<uint16_t>(g, s, n,
                          [&](uint16_t a, uint16_t c) { return bf16 ? b16(a, c) : f16(a, c); });
    return true;
  };
  if (r == Reduction::kAdd) return with(v_add_f16, v_add_bf16);
  if (r == Reduction::kMin) return with(v_min_f16, v_min_bf16);
  if (r == Reduction::kMax) return with(v_max_f16, v_max_bf16);
  return false;
}

}  // namespace

void reduce_bytes(Thread& t, int at, Reduction r, Element e, uint8_t* g, uint8_t const* s,
                  uint32_t n) {
  if (r == Reduction::kNone) {
    memcpy(g, s, n);
    return;
  }
  bool known = false;
  switch (e) {
    case Element::kF32:
      known = reduce_numbers<float>(r, g, s, n);
      break;
    case Element::kF64:
      known = reduce_numbers<double>(r, g, s, n);
      break;
    case Element::kS32:
      known = reduce_bits<int32_t>(r, g, s, n);
      break;
    case Element::kU32:
      known = reduce_bits<uint32_t>(r, g, s, n);
      break;
    case Element::kS64:
      known = reduce_bits<int64_t>(r, g, s, n);
      break;
    case Element::kU64:
      known = reduce_bits<uint64_t>(r, g, s, n);
      break;
    case Element::kF16:
      known = reduce_halves(r, false, g, s, n);
      break;
    case Element::kBF16:
      known = reduce_halves(r, true, g, s, n);
      break;
    default:
      break;
  }
  if (!known) t.fail(at, "this reduction of this type is not modelled");
}

void encode_tensor_map(void* out, int dtype, uint32_t rank, void* base, uint64_t const* dims,
                       uint64_t const* strides, uint32_t const* box,
                       uint32_t const* element_strides, int interleave, int swizzle, int oob) {
  TensorMap m{};
  m.base = uint64_t(base);
  m.rank = uint8_t(rank);
  m.dtype = uint8_t(dtype);
  m.interleave = uint8_t(interleave);
  m.swizzle = uint8_t(swizzle);
  m.oob = uint8_t(oob);
  for (uint32_t i = 0; i < rank; ++i) {
    m.dims[i] = dims[i];
    m.box[i] = uint16_t(box[i]);
    m.element_strides[i] = uint8_t(element_strides ? element_strides[i] : 1);
  }
  for (uint32_t i = 0; i + 1 < rank; ++i) m.strides[i] = strides[i];
  m.magic = kMagic;
  memset(out, 0, 128);
  memcpy(out, &m, sizeof m);
}

void Thread::tma_load(int where, int rank_, uint32_t dst, uint64_t map, int32_t const* c,
                      uint32_t barrier, bool multicast, uint32_t mask, int cta_group) {
  at = where;
  TensorMap const m = read_map(*this, where, map, rank_, dst);
  std::vector<int32_t> const coords(c, c + rank_);
  if (!multicast) mask = 1u << (dst >> kCtaShift);
  if (cta_group == 1 && !multicast && (barrier ^ dst) >> kCtaShift)
    fail(where, "the barrier of a tensor copy is in another thread block than its destination");
  if (mask >> cluster_size) fail(where, "multicast to a thread block outside the cluster");
  uint32_t bytes = kElementBytes[m.dtype];
  for (int i = 0; i < rank_; ++i) bytes *= m.box[i];
  HbOperation op = operation(*this, HbAgent{});
  if (is_ahead(*this))
    walk(m, coords.data(), [&](uint32_t, uint32_t, uint8_t const* g, uint32_t, uint32_t inside) {
      global_read(*this, where, g, inside);
    });
  for (uint32_t r = 0; r < cluster_size; ++r) {
    if (!(mask >> r & 1)) continue;
    uint32_t const d = mapa(dst, r);
    // With cta_group::2 the barrier may be the one of either block of the pair.
    uint32_t const b =
        cta_group == 2 ? mapa(barrier, (r & ~1u) | (barrier >> kCtaShift & 1)) : mapa(barrier, r);
    shared_range(*this, where, d, bytes);
    mbarrier_check(*this, where, b);
    post(*this, where, [=]() mutable {
      if (M.race) op.performer = M.race->barrier_phase(arena + b);
      async_write(*this, where, d, bytes, op);
      walk(m, coords.data(),
           [&](uint32_t offset, uint32_t n, uint8_t const* g, uint32_t before, uint32_t inside) {
             async_global(*this, where, g, inside, false, false, op);
             for (uint32_t i = 0; i < n; i += 16) {
               uint8_t chunk[16] = {0};
               uint32_t const size = std::min(n - i, 16u);
               for (uint32_t j = 0; j < size; ++j)
                 if (i + j >= before && i + j < before + inside) chunk[j] = g[i + j - before];
               memcpy(arena + swizzled(m, d + offset + i), chunk, size);
             }
           });
      mbarrier_complete_async(*this, where, b, bytes);
    });
  }
}

void Thread::tma_store(int where, int rank_, uint32_t src, uint64_t map, int32_t const* c,
                       Reduction r) {
  at = where;
  TensorMap const m = read_map(*this, where, map, rank_, src);
  std::vector<int32_t> const coords(c, c + rank_);
  uint32_t bytes = kElementBytes[m.dtype];
  for (int i = 0; i < rank_; ++i) bytes *= m.box[i];
  shared_range(*this, where, src, bytes);
  walk(m, coords.data(), [&](uint32_t, uint32_t, uint8_t const* g, uint32_t, uint32_t inside) {
    global_write(*this, where, g, inside);
  });
  HbOperation const read = operation(*this, kHbBulkRead), write = operation(*this, kHbBulkWrite);
  async->bulk_open.push_back(post_store(*this, where, [=] {
    async_read(*this, where, src, bytes, read);
    std::vector<uint8_t> row;
    walk(m, coords.data(),
         [&](uint32_t offset, uint32_t n, uint8_t* g, uint32_t before, uint32_t inside) {
           row.resize(n);
           for (uint32_t i = 0; i < n; i += 16)
             memcpy(row.data() + i, arena + swizzled(m, src + offset + i), std::min(n - i, 16u));
           if (!inside) return;
           async_global(*this, where, g, inside, true, r != Reduction::kNone, write);
           reduce_bytes(*this, where, r, kElementTypes[m.dtype], g, row.data() + before, inside);
         });
  }));
}

}  // namespace px
