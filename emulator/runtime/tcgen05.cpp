// Tensor memory and tcgen05: allocation, ld / st, mma, cp, commit; and cluster launch control.
//
// What one thread issues (mma, cp, commit) runs in issue order. PTX promises the order only for
// the same accumulator and shape; the hardware keeps it in general and known kernels rely on it.
#include <algorithm>

#include "operands.h"

namespace px {
namespace {

struct Instruction {
  uint32_t m, n, a_format, b_format, d_format;
  bool a_mn, b_mn, a_negate, b_negate, sparse;
};

Instruction decode_instruction(uint32_t d) {
  Instruction i{};
  i.sparse = d >> 2 & 1;
  i.d_format = d >> 4 & 3;
  i.a_format = d >> 7 & 7;
  i.b_format = d >> 10 & 7;
  i.a_negate = d >> 13 & 1;
  i.b_negate = d >> 14 & 1;
  i.a_mn = d >> 15 & 1;
  i.b_mn = d >> 16 & 1;
  i.n = (d >> 17 & 63) * 8;
  i.m = (d >> 24 & 31) * 16;
  return i;
}

// Where accumulator element (row, column) of an mma of `group` thread blocks lives.
struct TmemCell {
  uint32_t cta, lane, column;
};
TmemCell accumulator_cell(uint32_t group, uint32_t m, uint32_t n, uint32_t row, uint32_t column) {
  if (group == 1) return {0, m == 128 ? row : (row & 15) + (row >> 4) * 32, column};
  if (m == 256) return {row >> 7, row & 127, column};
  uint32_t const half = column >= n / 2;  // M = 128 over two blocks: the columns are folded
  return {row >> 6, (row & 63) + 64 * half, column - half * (n / 2)};
}

void check_columns(Thread& t, int at, uint32_t column, uint32_t n) {
  if (column + n > 512) t.fail(at, "tensor memory column past 512");
  for (uint32_t s = column / 32; s <= (column + n - 1) / 32; ++s) {
    if (t.cta->tmem_busy >> s & 1) continue;
    if (M.settings.tmem_strict)
      t.fail(at, "tensor memory columns not allocated (or already deallocated)");
    warn(t, at, "tensor memory columns not allocated (or already deallocated)");
  }
}

// The cell of register r of lane l; shapes 32x32b, 16x64b, 16x128b, 16x256b.
uint32_t* register_cell(Thread& t, int shape, int l, int r, uint32_t address) {
  int row, column;
  switch (shape) {
    case 0:
      row = l, column = r;
      break;
    case 1:
      row = l / 4 + 8 * (l % 2), column = l / 2 % 2 + 2 * r;
      break;
    case 2:
      row = l / 4 + 8 * (r % 2), column = l % 4 + 4 * (r / 2);
      break;
    default:
      row = l / 4 + 8 * (r / 2 % 2), column = r % 2 + 2 * (l % 4) + 8 * (r / 4);
  }
  return &t.cta->tmem[(address >> 16) + uint32_t(row)][(address & 0xffff) + uint32_t(column)];
}
constexpr uint32_t kShapeColumns[] = {1, 2, 4, 8};

void check_access(Thread& t, int at, int shape, int num, uint32_t address) {
  if (!t.cta->tmem) t.fail(at, "tensor memory exists from compute capability 10.0 on");
  uint32_t const first = 32 * (t.warp_id % 4), lane = address >> 16;
  if (lane != first && (shape == 0 || lane != first + 16))
    t.fail(at, "tcgen05.ld / st outside the 32 lanes of this warp");
  check_columns(t, at, address & 0xffff, kShapeColumns[shape] * uint32_t(num));
}

struct TmemArg {
  void* const* d;
  uint32_t const* v;
  uint32_t address;
};
TmemArg& tmem_arg(Collective& c, int lane) { return *static_cast<TmemArg*>(c.arg[lane]); }

// For the race check: what each lane knew when it issued a load or store.
std::vector<HbOperation> lane_views(Thread& t, HbOwn own) {
  std::vector<HbOperation> views;
  for (int l = 0; M.race && l < 32; ++l) {
    Thread& lane = *lane_of(t, l);
    HbAgent const& waited = lane.hb->own[own];
    views.push_back(M.race->tmem_operation(lane, {waited.id, waited.clock + 1}, false));
  }
  return views;
}
void lane_access(Thread& t, int at, int l, uint32_t const* cell, bool write,
                 std::vector<HbOperation> const& views) {
  M.race->async_access(*lane_of(t, l), at, reinterpret_cast<uint8_t const*>(cell), 4, write, false,
                       views[size_t(l)]);
}

void push(Thread& t, std::function<void()> fn) {
  if (t.async->tcgen05_queue.empty()) M.tcgen05_threads.push_back(&t);
  t.async->tcgen05_queue.push_back(std::move(fn));
}

uint32_t column_bits(uint32_t columns) {
  return columns == 512 ? 0xffffu : (1u << columns / 32) - 1;
}

}  // namespace

void Thread::tmem_alloc(int where, int, uint32_t dst, uint32_t n) {
  collective(*this, where, kAligned | uint64_t(where), kAllLanes, nullptr, "tcgen05.alloc",
             [=](Collective&) {
               if (!cta->tmem) fail(where, "tensor memory exists from compute capability 10.0 on");
               if (n < 32 || n > 512 || (n & (n - 1))) fail(where, "tcgen05.alloc column count");
               if (cta->tmem_relinquished)
                 fail(where, "tcgen05.alloc after relinquish_alloc_permit");
               uint32_t const units = n / 32, wanted = column_bits(n);
               for (uint32_t s = 0; s + units <= 16; s += units) {
                 if (cta->tmem_busy & wanted << s) continue;
                 cta->tmem_busy |= wanted << s;
                 for (int l = 0; l < 128; ++l) std::fill_n(&cta->tmem[l][s * 32], n, kTmemPoison);
                 wr<uint32_t>(store_shared(where, dst, 4), s * 32);
                 return;
               }
               fail(where,
                    "tcgen05.alloc would block for ever: no free columns in this thread block");
             });
}

void Thread::tmem_dealloc(int where, int, uint32_t address, uint32_t n) {
  collective(*this, where, kAligned | uint64_t(where), kAllLanes, nullptr, "tcgen05.dealloc",
             [=](Collective&) {
               uint32_t const mask = column_bits(n) << (address & 0xffff) / 32;
               if ((cta->tmem_busy & mask) != mask)
                 fail(where, "tcgen05.dealloc of columns not allocated");
               cta->tmem_busy &= ~mask;
               if (hb) M.race->tmem_free(*this, where, address & 0xffff, n);
             });
}

void Thread::tmem_relinquish(int where, int) {
  collective(*this, where, kAligned | uint64_t(where), kAllLanes, nullptr, "tcgen05.relinquish",
             [=](Collective&) { cta->tmem_relinquished = true; });
}

void Thread::tmem_load(int where, int shape, int num, int regs, void* const* d, uint32_t address) {
  TmemArg arg{d, nullptr, address};
  collective(*this, where, kAligned | uint64_t(where), kAllLanes, &arg, "tcgen05.ld",
             [=](Collective& c) {
               check_access(*this, where, shape, num, address);
               auto to = std::make_shared<std::vector<void*>>();
               for (int l = 0; l < 32; ++l) {
                 TmemArg const& q = tmem_arg(c, l);
                 if (q.address != address) fail(where, "tcgen05.ld address differs over the warp");
                 to->insert(to->end(), q.d, q.d + regs);
               }
               auto const views = lane_views(*this, kHbTmemLoad);
               auto work = [=, this] {
                 for (int l = 0; l < 32; ++l)
                   for (int r = 0; r < regs; ++r) {
                     uint32_t* const cell = register_cell(*this, shape, l, r, address);
                     if (!views.empty()) lane_access(*this, where, l, cell, false, views);
                     if (void* q = (*to)[size_t(l * regs + r)]) *static_cast<uint32_t*>(q) = *cell;
                   }
               };
               if (M.settings.tmem_load_at_issue) return work();
               Done const done = post(*this, where, work);
               for (int l = 0; l < 32; ++l) lane_of(*this, l)->async->tmem_loads.push_back(done);
             });
}

void Thread::tmem_store(int where, int shape, int num, int regs, uint32_t const* v,
                        uint32_t address) {
  TmemArg arg{nullptr, v, address};
  collective(*this, where, kAligned | uint64_t(where), kAllLanes, &arg, "tcgen05.st",
             [=](Collective& c) {
               check_access(*this, where, shape, num, address);
               auto from = std::make_shared<std::vector<uint32_t>>();
               for (int l = 0; l < 32; ++l) {
                 TmemArg const& q = tmem_arg(c, l);
                 if (q.address != address) fail(where, "tcgen05.st address differs over the warp");
                 from->insert(from->end(), q.v, q.v + regs);
               }
               auto const views = lane_views(*this, kHbTmemStore);
               auto work = [=, this] {
                 for (int l = 0; l < 32; ++l)
                   for (int r = 0; r < regs; ++r) {
                     uint32_t* const cell = register_cell(*this, shape, l, r, address);
                     if (!views.empty()) lane_access(*this, where, l, cell, true, views);
                     *cell = (*from)[size_t(l * regs + r)];
                   }
               };
               if (M.settings.tmem_store_at_issue) return work();
               Done const done = post(*this, where, work);
               for (int l = 0; l < 32; ++l) lane_of(*this, l)->async->tmem_stores.push_back(done);
             });
}

void Thread::tmem_wait(int where, bool store) {
  if (M.planted(Plant::kTmemWait, where)) return;
  Group& g = store ? async->tmem_stores : async->tmem_loads;
  wait_for(*this, where, g, store ? "tcgen05.wait::st" : "tcgen05.wait::ld");
  g.clear();
  if (hb) ++hb->own[store ? kHbTmemStore : kHbTmemLoad].clock;
}

void Thread::tcgen05_fence(int where, bool after) {
  at = where;
  if (M.planted(Plant::kTcgen05Fence, where)) return;
  if (hb) M.race->tmem_fence(*hb, after);
}

void Thread::tcgen05_commit(int where, int, uint32_t barrier, bool multicast, uint32_t mask) {
  at = where;
  HbAgent agent;
  // What the thread knew when it issued came before what is tracked.
  auto known = std::make_shared<HbClock>();
  if (hb) {
    agent = {hb->own[kHbTcgen05].id, ++async->tcgen05_committed};
    M.race->tmem_fence(*hb, false);
    M.race->release(*hb, *known);
  }
  bool const at_issue = M.planted(Plant::kCommit, where);
  if (!multicast) mask = 1u << (barrier >> kCtaShift);
  if (mask >> cluster_size) fail(where, "tcgen05.commit to a thread block outside the cluster");
  for (uint32_t r = 0; r < cluster_size; ++r) {
    if (!(mask >> r & 1)) continue;
    uint32_t const b = multicast ? mapa(barrier, r) : barrier;
    mbarrier_check(*this, where, b);
    if (at_issue) {
      mbarrier_arrive(where, b, 1, 0, false, kRelease);
      continue;
    }
    push(*this, [=] {
      if (M.race) M.race->merge(M.race->barrier_pending(arena + b), *known);
      mbarrier_arrive_async(*this, where, b, agent);
    });
  }
}

namespace {

struct MmaOp {
  Instruction in;
  Operand a, b;
  Element a_type, b_type;
  uint32_t size, depth, group, d, a_tmem;
  bool a_in_tmem, accumulate;
  std::vector<uint32_t> disabled_lanes;
  HbOperation hb, tmem;  // of shared memory, of tensor memory
};

void tmem_access(Thread& t, int at, void const* p, uint32_t words, bool write,
                 HbOperation const& op) {
  if (op.on)
    M.race->async_access(t, at, static_cast<uint8_t const*>(p), 4 * words, write, false, op);
}

void a_row_from_tmem(Thread& t, int at, MmaOp const& op, Cta const& cta, uint32_t lane, float* a) {
  uint32_t const per = 4 / op.size;
  tmem_access(t, at, &cta.tmem[(op.a_tmem >> 16) + lane][op.a_tmem & 0xffff], op.depth / per, false,
              op.tmem);
  for (uint32_t k = 0; k < op.depth; ++k) {
    uint32_t const w = cta.tmem[(op.a_tmem >> 16) + lane][(op.a_tmem & 0xffff) + k / per];
    a[k] = element_to_float(op.a_type, w >> (8 * op.size * (k % per)));
  }
}

void execute(Thread& t, int at, MmaOp const& op) {
  ++M.stats.matrix_ops;
  static float a[256 * 32], bt[32 * 256];
  Instruction const& in = op.in;
  uint32_t const fold = op.group == 2 && in.m == 128 ? 2 : 1;
  Cta* ctas[2] = {op.group == 2 ? t.cta->peer[t.rank & ~1u] : t.cta,
                  op.group == 2 ? t.cta->peer[t.rank | 1u] : nullptr};
  for (uint32_t g = 0; g < op.group; ++g) {
    uint32_t const columns = in.n / op.group, rows = in.m / op.group;
    gather_operand(t, at, *ctas[g], op.b, in.b_mn, op.b_type, op.size, columns, op.depth,
                   bt + g * columns, 256, true, &op.hb, 1);
    if (!op.a_in_tmem)
      gather_operand(t, at, *ctas[g], op.a, in.a_mn, op.a_type, op.size, rows, op.depth,
                     a + g * rows * 32, 32, false, &op.hb, 1);
  }
  float const sign = in.a_negate != in.b_negate ? -1.f : 1.f;
  for (uint32_t row = 0; row < in.m; ++row)
    for (uint32_t h = 0; h < fold; ++h) {
      uint32_t const n0 = h * in.n / fold, n = in.n / fold;
      TmemCell const cell = accumulator_cell(op.group, in.m, in.n, row, n0);
      Cta& cta = *ctas[cell.cta];
      uint32_t const lane = (op.d >> 16) + cell.lane;
      float values[32];
      if (op.a_in_tmem)
        a_row_from_tmem(t, at, op, cta, cell.lane, values);
      else
        std::copy_n(a + row * 32, op.depth, values);
      for (uint32_t k = 0; k < op.depth; ++k) values[k] *= sign;
      auto const& off = op.disabled_lanes;
      if (!off.empty() && off[lane / 32] >> (lane % 32) & 1) continue;
      auto* d = reinterpret_cast<float*>(&cta.tmem[lane][(op.d & 0xffff) + cell.column]);
      tmem_access(t, at, d, n, true, op.tmem);
      if (!op.accumulate) std::fill_n(d, n, 0.f);
      multiply_row(d, values, bt + n0, op.depth, n, 256);
    }
}

void check_shape(Thread& t, int at, Instruction const& in, int group) {
  if (in.sparse || in.d_format != 1) t.fail(at, "this tcgen05.mma type is not modelled");
  if (group == 1 ? in.m != 64 && in.m != 128 : in.m != 128 && in.m != 256)
    t.fail(at, "tcgen05.mma M");
  bool const by_16 = group == 2 || in.m == 128;
  if (in.n < 8 || in.n > 256 || (by_16 && in.n % 16)) t.fail(at, "tcgen05.mma N");
  if (group == 2 && t.cluster_size < 2) t.fail(at, "cta_group::2 outside a cluster");
}

}  // namespace

void Thread::tcgen05_mma(int where, int group, bool kind_f8, bool a_in_tmem, uint32_t d, uint64_t a,
                         uint64_t b_desc, uint32_t i_desc, uint32_t const* mask, int mask_words,
                         bool accumulate) {
  at = where;
  auto op = std::make_shared<MmaOp>();
  op->in = decode_instruction(i_desc);
  check_shape(*this, where, op->in, group);
  if (op->in.a_format > 1 || op->in.b_format > 1)
    fail(where, "this tcgen05.mma operand type is not modelled");
  Element const halves[] = {Element::kF16, Element::kBF16};
  Element const bytes[] = {Element::kE4M3, Element::kE5M2};
  op->a_type = (kind_f8 ? bytes : halves)[op->in.a_format];
  op->b_type = (kind_f8 ? bytes : halves)[op->in.b_format];
  op->size = kind_f8 ? 1 : 2;
  op->depth = 32 / op->size;
  op->b = decode_tcgen05(b_desc);
  op->a = decode_tcgen05(a_in_tmem ? 0 : a);
  if (op->b.version != 1 || (!a_in_tmem && op->a.version != 1))
    fail(where, "the version of a tcgen05 shared-memory descriptor must be 1");
  if (op->b.absolute_leading || op->a.absolute_leading)
    fail(where, "absolute leading-dimension mode is not modelled");
  if (a_in_tmem && op->in.a_mn) fail(where, "A in tensor memory cannot be transposed");
  uint32_t const fold = group == 2 && op->in.m == 128 ? 2 : 1;
  check_columns(*this, where, d & 0xffff, op->in.n / fold);
  if (a_in_tmem) check_columns(*this, where, uint32_t(a) & 0xffff, 8);
  op->group = uint32_t(group);
  op->d = d;
  op->a_tmem = uint32_t(a);
  op->a_in_tmem = a_in_tmem;
  op->accumulate = accumulate;
  op->disabled_lanes.assign(mask, mask + mask_words);
  if (hb) {
    HbAgent const agent = {hb->own[kHbTcgen05].id, async->tcgen05_committed + 1};
    op->hb = M.race->operation(*this, agent);
    op->tmem = M.race->tmem_operation(*this, agent, true);
  }
  push(*this, [=] { execute(*this, where, *op); });
}

// Shapes: 0 = 128x256b, 1 = 128x128b: rows of 32 or 16 bytes, one for each lane.
void Thread::tcgen05_cp(int where, int, int shape, uint32_t dst, uint64_t desc) {
  at = where;
  uint32_t const bytes = shape == 0 ? 32 : 16;
  check_columns(*this, where, dst & 0xffff, bytes / 4);
  Operand const o = decode_tcgen05(desc);
  HbOperation op, tmem;
  if (hb) {
    HbAgent const agent = {hb->own[kHbTcgen05].id, async->tcgen05_committed + 1};
    op = M.race->operation(*this, agent);
    tmem = M.race->tmem_operation(*this, agent, true);
  }
  push(*this, [=] {
    for (uint32_t row = 0; row < 128; ++row)
      for (uint32_t k = 0; k < bytes; k += 16) {
        uint32_t const a = smem_tag | chunk_address(o, false, 1, row, k);
        async_read(*this, where, a, 16, op);
        uint32_t* const to = &cta->tmem[(dst >> 16) + row][(dst & 0xffff) + k / 4];
        tmem_access(*this, where, to, 4, true, tmem);
        memcpy(to, arena + a, 16);
      }
  });
}

// The answer is 16 bytes: first block of the cancelled cluster and a flag that there was one.
void Thread::clc_try_cancel(int where, uint32_t dst, uint32_t barrier, bool multicast) {
  at = where;
  if (dst & 15) fail(where, "clusterlaunchcontrol needs a 16-byte aligned answer");
  for (uint32_t r = 0; r < cluster_size; ++r)
    if (multicast || r == dst >> kCtaShift) mbarrier_check(*this, where, mapa(barrier, r));
  HbOperation op = operation(*this, HbAgent{});
  op.after_reads = true;
  post(*this, where, [=]() mutable {
    uint32_t answer[4] = {0, 0, 0, 0};
    answer[3] = next_cluster_to_cancel(answer);
    for (uint32_t r = 0; r < cluster_size; ++r) {
      if (!multicast && r != dst >> kCtaShift) continue;
      uint32_t const d = mapa(dst, r), b = mapa(barrier, r);
      if (M.race) op.performer = M.race->barrier_phase(arena + b);
      async_write(*this, where, d, 16, op);
      memcpy(arena + d, answer, 16);
      mbarrier_complete_async(*this, where, b, 16);
    }
  });
}

}  // namespace px
