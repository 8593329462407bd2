// wgmma: 128 threads meet, the product happens later, registers are read and written when it does.
#include <algorithm>

#include "operands.h"

namespace px {

void gather_operand(Thread& t, int at, Cta& cta, Operand const& o, bool mn_major, Element e,
                    uint32_t size, uint32_t rows, uint32_t depth, float* out, uint32_t pitch,
                    bool by_depth, HbOperation const* ops, int num_ops) {
  if (o.chunks > 1 && o.base_offset) t.fail(at, "descriptor base offsets are not modelled");
  if (o.start & 15) t.fail(at, "misaligned matrix descriptor");
  uint8_t const* base = t.arena + uint64_t(cta.rank) * kCtaStride;
  uint32_t const per_chunk = 16 / size;
  uint32_t const row_step = mn_major ? per_chunk : 1, k_step = mn_major ? 1 : per_chunk;
  for (uint32_t row = 0; row < rows; row += row_step)
    for (uint32_t k = 0; k < depth; k += k_step) {
      uint32_t const a = chunk_address(o, mn_major, size, row, k);
      if (a + 16 > cta.smem_size) t.fail(at, "a matrix descriptor reaches outside shared memory");
      async_read(t, at, cta.rank << kCtaShift | a, 16, num_ops ? ops[0] : HbOperation{});
      for (int i = 1; i < num_ops; ++i) async_read(t, at, cta.rank << kCtaShift | a, 16, ops[i]);
      for (uint32_t i = 0; i < per_chunk; ++i) {
        uint32_t bits = 0;
        memcpy(&bits, base + a + i * size, size);
        uint32_t const r = mn_major ? row + i : row, kk = mn_major ? k : k + i;
        if (r < rows && kk < depth)
          out[by_depth ? kk * pitch + r : r * pitch + kk] = element_to_float(e, bits);
      }
    }
}

namespace {

struct WgmmaOp {
  std::unique_ptr<WgmmaGather> who;
  int n;
  Element a_type, b_type;
  uint32_t size, depth;
  bool registers, scale_d, f16_accumulator, a_mn_major, b_mn_major;
  float scale;
  uint64_t a_desc, b_desc;
  std::vector<HbOperation> ops;
};

// Element (row, column) of D: as for mma.sync, each warp holding 16 rows.
uint32_t* cell(WgmmaOp const& op, int row, int col) {
  int const lane = row / 16 * 32 + row % 8 * 4 + col % 8 / 2, high = row % 16 / 8;
  int const reg = op.f16_accumulator ? col / 8 * 2 + high : col / 8 * 4 + high * 2 + col % 2;
  return static_cast<uint32_t*>(op.who->d[lane][reg]);
}

float read_cell(WgmmaOp const& op, int row, int col) {
  uint32_t const v = *cell(op, row, col);
  return op.f16_accumulator ? cvt_f16(uint16_t(col % 2 ? v >> 16 : v)) : f(v);
}

void write_cell(WgmmaOp const& op, int row, int col, float x) {
  uint32_t* p = cell(op, row, col);
  if (!op.f16_accumulator)
    *p = b(x);
  else if (col % 2)
    *p = (*p & 0xffff) | uint32_t(to_f16_rn(x)) << 16;
  else
    *p = (*p & 0xffff0000u) | to_f16_rn(x);
}

void a_row_from_registers(WgmmaOp const& op, int row, float* a) {
  int const per = 4 / int(op.size);
  for (int k = 0; k < int(op.depth); ++k) {
    int const lane = row / 16 * 32 + row % 8 * 4 + k % (4 * per) / per;
    int const reg = row % 16 / 8 + 2 * (k / (4 * per));
    uint32_t const v = *static_cast<uint32_t*>(op.who->a[lane][reg]);
    a[k] = element_to_float(op.a_type, v >> (8 * int(op.size) * (k % per)));
  }
}

void execute(WgmmaOp& op) {
  ++M.stats.matrix_ops;
  static float a[64][32], bt[32 * 256], d[256];
  Thread& t = *op.who->threads[0];
  int const at = op.who->at;
  M.asynchronous = &t;
  int const num_ops = int(op.ops.size());
  if (!op.registers)
    gather_operand(t, at, *t.cta, decode_wgmma(op.a_desc), op.a_mn_major, op.a_type, op.size, 64,
                   op.depth, &a[0][0], 32, false, op.ops.data(), num_ops);
  gather_operand(t, at, *t.cta, decode_wgmma(op.b_desc), op.b_mn_major, op.b_type, op.size,
                 uint32_t(op.n), op.depth, bt, 256, true, op.ops.data(), num_ops);
  for (int row = 0; row < 64; ++row) {
    if (op.registers) a_row_from_registers(op, row, a[row]);
    for (uint32_t k = 0; k < op.depth; ++k) a[row][k] *= op.scale;
    for (int j = 0; j < op.n; ++j) d[j] = op.scale_d ? read_cell(op, row, j) : 0.f;
    multiply_row(d, a[row], bt, op.depth, uint32_t(op.n), 256);
    for (int j = 0; j < op.n; ++j) write_cell(op, row, j, d[j]);
  }
}

void check_waits(WgmmaGather const& g) {
  for (int w = 1; w < 4; ++w)
    if (g.threads[32 * w]->async->wgmma_waits != g.threads[0]->async->wgmma_waits)
      g.threads[32 * w]->fail(g.at,
                              "wgmma.wait_group was executed by some warps of the warpgroup only");
}

}  // namespace

void Thread::wgmma(int where, int n, Element a_type, Element b_type, void* const* d, void* const* a,
                   uint64_t a_desc, uint64_t b_desc, bool scale_d, int scale_a, int scale_b,
                   bool a_mn_major, bool b_mn_major, bool f16_accumulator) {
  at = where;
  if (!async->wgmma_fenced)
    fail(where, "wgmma without a wgmma.fence since its registers could have been written");
  int const group = int(warp_id / 4);
  auto& slot = cta->wgmma_gather[group];
  if (!slot) {
    slot = std::make_unique<WgmmaGather>();
    slot->at = where;
    slot->function = function;
  }
  WgmmaGather* g = slot.get();
  if (g->at != where || g->function != function)
    fail(where, "the warps of a warpgroup execute different wgmma");
  uint32_t const i = warp_id % 4 * 32 + lane;
  g->threads[i] = this;
  g->d[i].assign(d, d + (f16_accumulator ? n / 4 : n / 2));
  if (a) g->a[i].assign(a, a + 4);
  if (++g->n < 128) {
    g->blocked.push_back(this);
    block(*this, where, "wgmma (the rest of the warpgroup)");
    return;
  }
  auto op = std::make_shared<WgmmaOp>();
  op->who = std::move(slot);
  slot.reset();
  check_waits(*op->who);
  op->n = n;
  op->a_type = a_type;
  op->b_type = b_type;
  op->size = a_type == Element::kTF32                              ? 4
             : a_type == Element::kF16 || a_type == Element::kBF16 ? 2
                                                                   : 1;
  op->depth = 32 / op->size;
  op->registers = a != nullptr;
  op->scale_d = scale_d;
  op->f16_accumulator = f16_accumulator;
  op->a_mn_major = a_mn_major;
  op->b_mn_major = b_mn_major;
  op->scale = float(scale_a * scale_b);
  op->a_desc = a_desc;
  op->b_desc = b_desc;
  // A wgmma completes for the whole warpgroup, whichever warp waits for it; but each warp must
  // know that the operands are there.
  if (M.race)
    for (int w = 0; w < 4; ++w) {
      Thread& t = *op->who->threads[32 * w];
      HbAgent const agent{t.hb->own[kHbWgmma].id, uint32_t(t.async->wgmma_committed) + 1};
      op->ops.push_back(M.race->operation(t, agent));
    }
  auto done = std::make_shared<Flag>();
  for (Thread* t : op->who->threads) t->async->wgmma_open.push_back(done);
  M.wgmma_queues[{cta, group}].push_back([op, done] {
    execute(*op);
    done->done = true;
  });
  for (Thread* t : op->who->blocked) M.wake(t);
}

void Thread::wgmma_fence(int where) {
  at = where;
  if (M.planted(Plant::kWgmmaFence, where)) return;
  async->wgmma_fenced = true;
}

void Thread::wgmma_commit(int where) {
  at = where;
  async->wgmma_groups.push_back(std::move(async->wgmma_open));
  async->wgmma_open.clear();
  ++async->wgmma_committed;
}

void Thread::wgmma_wait(int where, uint32_t n) {
  if (M.planted(Plant::kWgmmaWait, where)) return;
  auto& groups = async->wgmma_groups;
  while (groups.size() > n) {
    wait_for(*this, where, groups.front(), "wgmma.wait_group");
    groups.pop_front();
  }
  ++async->wgmma_waits;
  async->wgmma_fenced = false;
  if (hb) hb->own[kHbWgmma].clock = async->wgmma_committed - uint32_t(groups.size());
  collective(*this, where, kAligned | uint64_t(where), kAllLanes, nullptr, "wgmma.wait_group",
             [](Collective&) {});
}

}  // namespace px
