// See race.h. The rules that are not obvious:
//
// * bar.sync, bar.warp.sync, barrier.cluster and mbarriers order memory; shfl, vote, elect, mma
//   and ldmatrix do not.
// * cp.async is generic-proxy work of its thread; TMA, bulk copies, wgmma and tcgen05 are the
//   asynchronous proxy's. What they see of generic-proxy writes must have passed a proxy fence
//   somewhere on the way (writer's or issuer's side).
// * Tensor memory: tcgen05.ld and .st count as done once waited for, and others hear of it only
//   after tcgen05.fence::before_thread_sync; what a thread has heard orders its own tcgen05 work
//   only after fence::after_thread_sync. tcgen05.commit fences and tells of the products before it
//   when its mbarrier completes; products of one thread are in order among themselves.
// * A relaxed access (volatile, atomics) publishes what was known at the last __threadfence and
//   collects what the next one acquires. A fence of block scope orders nothing for other blocks.
#include "race.h"

#include <algorithm>

#include "machine.h"

namespace px {

static uint8_t const* tmem_cell(Cta const& c, uint32_t lane, uint32_t column) {
  return reinterpret_cast<uint8_t const*>(&c.tmem[0][0] + lane * 512 + column);
}

uint32_t RaceDetector::new_agent(std::string name) {
  auto [it, fresh] = reusable_.try_emplace(name, num_agents_);
  if (fresh) {
    ++num_agents_;
    names_.push_back(std::move(name));
    clocks_.resize(num_agents_, 0);
  }
  return it->second;
}

void RaceDetector::start_launch() {
  *this = RaceDetector();
  grid_before_ = new_agent("the kernel before");
}

void RaceDetector::start_cluster(Cluster& cluster) {
  auto const first = uint64_t(cluster.arena);
  auto const last = first + uint64_t(kMaxClusterSize) * kCtaStride;
  auto in_window = [&](uint8_t const* p) { return uint64_t(p) >= first && uint64_t(p) < last; };
  forget(cluster.arena, cluster.arena + size_t(kMaxClusterSize) * kCtaStride);
  for (auto const& c : cluster.ctas)
    if (c->tmem) forget(tmem_cell(*c, 0, 0), tmem_cell(*c, 128, 0));
  for (auto it = barriers_.begin(); it != barriers_.end();)
    it = in_window(it->first) ? barriers_.erase(it) : ++it;
  for (auto it = locations_.begin(); it != locations_.end();)
    it = in_window(it->first) ? locations_.erase(it) : ++it;
}

// Agents are reused by the next cluster in the same slot; their clocks go on.
void RaceDetector::start_thread(Thread& t, HbThread& hb) {
  std::string const block =
      "slot " + std::to_string(t.cta->cluster->slot) + ", rank " + std::to_string(t.rank);
  std::string const warpgroup = block + ", warpgroup " + std::to_string(t.warp_id / 4);
  std::string const thread =
      block + ", warp " + std::to_string(t.warp_id) + ", lane " + std::to_string(t.lane);
  char const* kinds[] = {"",
                         ", its cp.async",
                         ", its bulk stores (source)",
                         ", its bulk stores",
                         ", its wgmma",
                         ", its tcgen05",
                         ", its tcgen05.ld",
                         ", its tcgen05.st"};
  for (int k = 0; k < (t.cta->tmem ? kHbOwnCount : kHbTcgen05); ++k) {
    uint32_t const id = new_agent((k == kHbWgmma ? warpgroup : thread) + kinds[k]);
    hb.own[k] = {id, 0};
  }
  hb.own[kHbThread].clock = ++clocks_[hb.own[kHbThread].id];
}

// ---- vectors -------------------------------------------------------------------------------

void RaceDetector::add(std::shared_ptr<HbVector>& into, HbAgent const& agent) {
  if (!agent.id) return;
  if (!into) into = std::make_shared<HbVector>();
  if (agent.id < into->size() && (*into)[agent.id] >= agent.clock) return;
  if (into.use_count() > 1) into = std::make_shared<HbVector>(*into);
  if (agent.id >= into->size()) into->resize(num_agents_, 0);
  (*into)[agent.id] = std::max((*into)[agent.id], agent.clock);
}

void RaceDetector::join(std::shared_ptr<HbVector>& into, std::shared_ptr<HbVector> const& from) {
  if (!from || into == from) return;
  if (!into) {
    into = from;
    return;
  }
  for (Memo const& m : memo_)
    if (m.a == into && m.b == from) {
      into = m.result;
      return;
    }
  bool grows = false, covers = from->size() >= into->size();
  for (size_t i = 0; i < from->size(); ++i) {
    uint32_t const old = i < into->size() ? (*into)[i] : 0;
    grows |= (*from)[i] > old;
    covers &= (*from)[i] >= old;
  }
  if (!grows) return;
  auto result = from;
  if (!covers) {
    result = std::make_shared<HbVector>(*into);
    if (result->size() < from->size()) result->resize(from->size(), 0);
    for (size_t i = 0; i < from->size(); ++i) (*result)[i] = std::max((*result)[i], (*from)[i]);
  }
  memo_[memo_next_++ % 16] = {into, from, result};
  into = result;
}

void RaceDetector::merge(HbClock& into, HbClock const& from) {
  join(into.known, from.known);
  join(into.fenced, from.fenced);
}

void RaceDetector::release(HbThread& hb, HbClock& into) {
  auto const& seen = into.joined;
  if (hb.clock.known && std::find(seen.begin(), seen.end(), hb.clock.known) == seen.end()) {
    join(into.known, hb.clock.known);
    into.joined.push_back(hb.clock.known);
  }
  join(into.fenced, hb.clock.fenced);
  for (int k = 0; k < kHbTmemLoad; ++k) add(into.known, hb.own[k]);
  for (int k = kHbTmemLoad; k < kHbOwnCount; ++k)
    add(into.known, {hb.own[k].id, hb.tmem_told[k - kHbTmemLoad]});
  add(into.fenced, {hb.own[kHbThread].id, hb.fenced_clock});
  hb.own[kHbThread].clock = ++clocks_[hb.own[kHbThread].id];
}

void RaceDetector::acquire(HbThread& hb, HbClock const& from) { merge(hb.clock, from); }

void RaceDetector::grid_wait(HbThread& hb) { add(hb.clock.known, {grid_before_, 1}); }

bool RaceDetector::knows_grid_wait(HbThread const& hb) const {
  HbVector const* known = hb.clock.known.get();
  return known && grid_before_ < known->size() && (*known)[grid_before_] != 0;
}

void RaceDetector::warp_barrier(Thread* const* threads, uint32_t mask) {
  HbClock clock;
  for (int l = 0; l < 32; ++l)
    if (mask >> l & 1) release(*threads[l]->hb, clock);
  for (int l = 0; l < 32; ++l)
    if (mask >> l & 1) acquire(*threads[l]->hb, clock);
}

void RaceDetector::fence(HbThread& hb, int scope) {
  bool const wide = scope != kScopeCta;
  acquire(hb, hb.pending_cta);
  hb.pending_cta.clear();
  if (wide) {
    acquire(hb, hb.pending_gpu);
    hb.pending_gpu.clear();
  }
  HbClock now;
  release(hb, now);
  hb.fence_cta = now;
  hb.has_fence_cta = true;
  if (wide) {
    hb.fence_gpu = now;
    hb.has_fence_gpu = true;
  }
}

void RaceDetector::fence_proxy(HbThread& hb) {
  hb.clock.fenced = hb.clock.known;
  hb.fenced_clock = hb.own[kHbThread].clock;
  hb.own[kHbThread].clock = ++clocks_[hb.own[kHbThread].id];
}

HbOperation RaceDetector::operation(Thread& t, HbAgent performer) {
  HbOperation op;
  op.known = t.hb->clock.known;
  op.fenced = t.hb->clock.fenced;
  std::copy_n(t.hb->own, int(kHbOwnCount), op.own);
  op.fenced_clock = t.hb->fenced_clock;
  op.performer = performer;
  op.on = true;
  return op;
}

// ---- tensor memory -------------------------------------------------------------------------

HbOperation RaceDetector::tmem_operation(Thread& t, HbAgent performer, bool in_order) {
  HbOperation op = operation(t, performer);
  op.known = t.hb->tmem_known;
  op.in_order = in_order;
  return op;
}

void RaceDetector::tmem_fence(HbThread& hb, bool after) {
  if (after)
    hb.tmem_known = hb.clock.known;
  else
    for (int k = kHbTmemLoad; k < kHbOwnCount; ++k) hb.tmem_told[k - kHbTmemLoad] = hb.own[k].clock;
}

// tcgen05.dealloc comes after every use of the columns that one of the warp's lanes has heard of.
void RaceDetector::tmem_free(Thread& t, int at, uint32_t column, uint32_t columns) {
  HbOperation view = operation(t, t.hb->own[kHbThread]);
  for (Thread* lane : t.warp->lanes) {
    join(view.known, lane->hb->clock.known);
    for (HbAgent const& own : lane->hb->own) add(view.known, own);
  }
  for (uint32_t row = 0; row < 128; ++row) {
    uint8_t const* p = tmem_cell(*t.cta, row, column);
    async_access(t, at, p, columns * 4, true, false, view);
    forget(p, p + columns * 4);
  }
}

void RaceDetector::strong(Thread& t, uint8_t const* p, bool reads, bool writes, int order,
                          int scope) {
  HbThread& hb = *t.hb;
  SyncLocation& l = locations_[p];
  bool const wide = scope != kScopeCta;
  if (reads) {
    if (order & kAcquire) {
      if (wide) acquire(hb, l.gpu);
      if (l.cta_owner == t.cta) acquire(hb, l.cta);
    } else {
      merge(hb.pending_gpu, l.gpu);
      if (l.cta_owner == t.cta) merge(hb.pending_cta, l.cta);
      merge(hb.pending_cta, l.gpu);
    }
  }
  if (!writes) return;
  if (!reads) l = SyncLocation();  // a plain store ends the release sequence
  if (l.cta_owner != t.cta) l.cta.clear();
  l.cta_owner = t.cta;
  if (order & kRelease) {
    HbClock now;
    release(hb, now);
    merge(l.cta, now);
    if (wide) merge(l.gpu, now);
  } else {
    if (hb.has_fence_cta) merge(l.cta, hb.fence_cta);
    if (hb.has_fence_gpu && wide) merge(l.gpu, hb.fence_gpu);
  }
}

// ---- mbarriers -----------------------------------------------------------------------------

void RaceDetector::barrier_init(uint8_t const* p) {
  Barrier& b = barriers_[p];
  uint32_t const phase = b.phase;
  b = Barrier();
  char name[40];
  snprintf(name, sizeof name, "copies on mbarrier %p", static_cast<void const*>(p));
  b.agent = new_agent(name);
  b.phase = phase;
}
HbAgent RaceDetector::barrier_phase(uint8_t const* p) {
  Barrier const& b = barriers_[p];
  return {b.agent, b.phase + 1};
}
HbClock& RaceDetector::barrier_pending(uint8_t const* p) { return barriers_[p].pending; }
void RaceDetector::barrier_learn(uint8_t const* p, HbAgent const& agent) {
  add(barriers_[p].pending.known, agent);
}
void RaceDetector::barrier_complete(uint8_t const* p) {
  Barrier& b = barriers_[p];
  ++b.phase;
  merge(b.completed, b.pending);
  add(b.completed.known, {b.agent, b.phase});
  // What the copies wrote was written by the asynchronous proxy: it needs no fence.
  add(b.completed.fenced, {b.agent, b.phase});
  b.pending.clear();
}
HbClock const& RaceDetector::barrier_completed(uint8_t const* p) { return barriers_[p].completed; }

// ---- accesses ------------------------------------------------------------------------------

RaceDetector::Cell& RaceDetector::cell(uint64_t word) {
  auto& page = pages_[word / 256];
  if (!page) page = std::make_unique<Page>();
  return page->cells[word % 256];
}

void RaceDetector::forget(uint8_t const* first, uint8_t const* last) {
  auto const begin = uint64_t(first) / 4, end = uint64_t(last) / 4;
  if (end - begin < 256) {  // part of a page
    for (uint64_t word = begin; word < end; ++word) cell(word) = Cell();
    return;
  }
  for (auto it = pages_.begin(); it != pages_.end();)
    it = it->first * 256 >= begin && it->first * 256 < end ? pages_.erase(it) : ++it;
}

static bool contains(std::shared_ptr<HbVector> const& v, HbAgent const& a) {
  return v && a.id < v->size() && (*v)[a.id] >= a.clock;
}

bool RaceDetector::knows(HbOperation const& view, Access const& access, bool async) const {
  if (view.in_order && access.agent.id == view.performer.id) return true;
  bool const through_fence = async && !access.async;
  for (HbAgent const& own : view.own)
    if (own.id == access.agent.id) {
      uint32_t const clock = through_fence ? view.fenced_clock : own.clock;
      if (clock >= access.agent.clock) return true;
    }
  return contains(through_fence ? view.fenced : view.known, access.agent);
}

void RaceDetector::report(Thread& t, int at, uint8_t const* p, bool write, Access const& now,
                          Access const& before, bool before_was_write, bool missing_proxy) {
  char place[64];
  uint64_t column = ~0ull;
  for (uint32_t r = 0; r < t.cluster_size; ++r)
    if (Cta const& c = *t.cta->peer[r];
        c.tmem && p >= tmem_cell(c, 0, 0) && p < tmem_cell(c, 128, 0))
      column = uint64_t(p - tmem_cell(c, 0, 0)) / 4;
  if (column != ~0ull)
    snprintf(place, sizeof place, "tensor memory, lane %u, column %u", unsigned(column / 512),
             unsigned(column % 512));
  else if (t.is_shared(uint64_t(p)))
    snprintf(place, sizeof place, "shared+0x%llx of rank %u",
             (unsigned long long)(uint64_t(p - t.arena) & (kCtaStride - 1)),
             unsigned(uint64_t(p - t.arena) >> kCtaShift));
  else
    snprintf(place, sizeof place, "global %p", static_cast<void const*>(p));
  std::string text =
      missing_proxy ? "race: no fence.proxy.async between the proxies; " : "race: not ordered; ";
  text += std::string(now.async ? "asynchronous " : "") + (write ? "write to " : "read of ") +
          place + " after a " + (before_was_write ? "write" : "read") + " by " +
          names_[before.agent.id];
  Site const site = site_of(before.function, before.at);
  if (site.ptx_line)
    text += " at " + (site.frames.empty() ? std::string(before.function->ptx_file) : site.frames) +
            " (PTX line " + std::to_string(site.ptx_line) + ")";
  t.fail(at, text.c_str());
}

void RaceDetector::touch(Thread& t, int at, uint8_t const* p, uint32_t n, bool write,
                         Access const& proto, HbOperation const& view) {
  uint64_t const first = uint64_t(p), last = first + n;
  for (uint64_t word = first / 4; word * 4 < last; ++word) {
    Access a = proto;
    uint32_t const lo = word * 4 < first ? uint32_t(first - word * 4) : 0;
    uint32_t const hi = word * 4 + 4 > last ? uint32_t(last - word * 4) : 4;
    a.mask = uint8_t((1u << hi) - (1u << lo));
    Cell& c = cell(word);
    if (write && view.in_order && c.reads.empty() && c.writes.size() == 1 &&
        c.writes[0].agent.id == a.agent.id && c.writes[0].mask == a.mask) {
      c.writes[0] = a;  // product after product
      continue;
    }
    auto check = [&](std::vector<Access> const& list, bool writes) {
      for (Access const& b : list) {
        if (!(b.mask & a.mask) || (a.strong && b.strong)) continue;
        // Reads come before an asynchronous write without a proxy fence: nothing is stale. Not so
        // the answers of cluster launch control, for which the ISA asks for one.
        bool const proxies = a.async && (writes || view.after_reads);
        if (!knows(view, b, proxies))
          report(t, at, p, write, a, b, writes, proxies && knows(view, b, false));
      }
    };
    check(c.writes, true);
    if (write) check(c.reads, false);
    auto covered = [&](Access const& b) { return (b.mask & ~a.mask) == 0; };
    auto drop = [&](std::vector<Access>& list, auto which) {
      list.erase(std::remove_if(list.begin(), list.end(), which), list.end());
    };
    if (write) {
      drop(c.reads, covered);
      drop(c.writes, covered);
      c.writes.push_back(a);
    } else {
      drop(c.reads, [&](Access const& b) {
        return b.agent.id == a.agent.id && b.strong == a.strong && covered(b);
      });
      c.reads.push_back(a);
    }
  }
}

void RaceDetector::access(Thread& t, int at, uint8_t const* p, uint32_t n, bool write,
                          bool strong) {
  HbOperation const view = operation(t, t.hb->own[kHbThread]);
  touch(t, at, p, n, write, {view.performer, t.function, at, 0, strong, false}, view);
}

void RaceDetector::async_access(Thread& t, int at, uint8_t const* p, uint32_t n, bool write,
                                bool strong, HbOperation const& op, bool generic_proxy) {
  if (!n) return;
  touch(t, at, p, n, write, {op.performer, t.function, at, 0, strong, !generic_proxy}, op);
}

}  // namespace px
