// mbarriers, packed into their 8 bytes of shared memory so that overwriting one shows:
// pending 20 bits | expected 20 | tx 22, signed | valid | phase.
#include "machine.h"

namespace px {
namespace {

struct Mbarrier {
  uint32_t pending, expected;
  int32_t tx;
  bool valid, phase;
};

Mbarrier unpack(uint64_t w) {
  return {uint32_t(w & 0xfffff), uint32_t(w >> 20 & 0xfffff),
          int32_t(uint32_t(w >> 40 & 0x3fffff) << 10) >> 10, bool(w >> 62 & 1), bool(w >> 63)};
}

void store(uint8_t* p, Mbarrier const& m) {
  uint64_t const word = uint64_t(m.pending) | uint64_t(m.expected) << 20 |
                        uint64_t(uint32_t(m.tx) & 0x3fffff) << 40 | uint64_t(m.valid) << 62 |
                        uint64_t(m.phase) << 63;
  wr<uint64_t>(p, word);
  M.mbarriers[p] = word;
}

uint8_t* address_of(Thread& t, int at, uint32_t a) { return shared_address(t, at, a, 8); }

Mbarrier load(Thread& t, int at, uint8_t* p) {
  auto const it = M.mbarriers.find(p);
  if (it == M.mbarriers.end()) t.fail(at, "operation on an mbarrier that was not initialised");
  if (it->second != rd<uint64_t>(p)) t.fail(at, "operation on an mbarrier that was overwritten");
  Mbarrier const m = unpack(it->second);
  return m;
}

void settle(Thread& t, int at, uint8_t* p, Mbarrier& m) {
  if (m.tx < -(1 << 20) || m.tx >= (1 << 20)) t.fail(at, "mbarrier transaction count out of range");
  if (m.pending == 0 && m.tx == 0) {
    m.phase = !m.phase;
    m.pending = m.expected;
    if (M.race) M.race->barrier_complete(p);
    auto it = M.mbarrier_waiters.find(p);
    if (it != M.mbarrier_waiters.end()) {
      for (Thread* w : it->second) M.wake(w);
      M.mbarrier_waiters.erase(it);
    }
  }
  M.progress();
  store(p, m);
}

void arrive(Thread& t, int at, uint8_t* p, uint32_t count, uint32_t tx, bool drop) {
  Mbarrier m = load(t, at, p);
  if (m.pending < count) t.fail(at, "more arrivals on an mbarrier than its phase expects");
  m.tx += int32_t(tx);
  m.pending -= count;
  if (drop) m.expected -= count;
  settle(t, at, p, m);
}

}  // namespace

std::string mbarrier_text(uint8_t const* p) {
  Mbarrier const m = unpack(rd<uint64_t>(p));
  auto const it = M.mbarriers.find(const_cast<uint8_t*>(p));
  if (it == M.mbarriers.end() || it->second != rd<uint64_t>(p)) return "been overwritten";
  return "phase " + std::to_string(m.phase) + ", " + std::to_string(m.pending) + " of " +
         std::to_string(m.expected) + " arrivals and " + std::to_string(m.tx) + " bytes missing";
}

void Thread::mbarrier_init(int where, uint32_t a, uint32_t count) {
  at = where;
  if (count == 0 || count > 0xfffff) fail(where, "mbarrier count");
  uint8_t* p = address_of(*this, where, a);
  if (hb) {
    M.race->access(*this, where, p, 8, true, false);
    M.race->barrier_init(p);
  }
  store(p, {count, count, 0, true, false});
  M.mbarrier_inits[p] = {this, ++M.time};
}

void Thread::mbarrier_inval(int where, uint32_t a) {
  at = where;
  uint8_t* p = address_of(*this, where, a);
  load(*this, where, p);
  wr<uint64_t>(p, 0);
  M.mbarriers.erase(p);
}

// For asynchronous work that will complete on the barrier: it must be initialised, and the
// initialisation made visible to the asynchronous proxy.
void mbarrier_check(Thread& t, int at, uint32_t a) {
  uint8_t* p = address_of(t, at, a);
  load(t, at, p);
  if (t.hb) M.race->access(t, at, p, 8, true, true);
  auto it = M.mbarrier_inits.find(p);
  if (it == M.mbarrier_inits.end()) return;
  if (it->second.thread->async->fence_time < it->second.time &&
      t.async->fence_time < it->second.time && M.settings.proxy_check)
    t.fail(at,
           "asynchronous use of an mbarrier without fence.mbarrier_init or fence.proxy.async "
           "after its initialisation");
  M.mbarrier_inits.erase(it);
}

void mbarrier_add_pending(Thread& t, int at, uint32_t a) {
  uint8_t* p = address_of(t, at, a);
  Mbarrier m = load(t, at, p);
  ++m.pending;
  store(p, m);
}

uint64_t Thread::mbarrier_arrive(int where, uint32_t a, uint32_t count, uint32_t tx, bool drop,
                                 int order) {
  at = where;
  if (M.planted(Plant::kMbarrierArrive, where)) return 0;
  if (tx && M.planted(Plant::kBytes, where)) tx += 16;
  uint8_t* p = address_of(*this, where, a);
  uint64_t const old = rd<uint64_t>(p);
  if (hb) {
    M.race->access(*this, where, p, 8, true, true);
    if (order & kRelease) M.race->release(*hb, M.race->barrier_pending(p));
  }
  arrive(*this, where, p, count, tx, drop);
  return old;
}

void mbarrier_arrive_async(Thread& t, int at, uint32_t a, HbAgent const& agent) {
  uint8_t* p = address_of(t, at, a);
  if (M.race && agent.id) M.race->barrier_learn(p, agent);
  arrive(t, at, p, 1, 0, false);
}

void mbarrier_complete_async(Thread& t, int at, uint32_t a, uint32_t bytes) {
  uint8_t* p = address_of(t, at, a);
  Mbarrier m = load(t, at, p);
  m.tx -= int32_t(bytes);
  settle(t, at, p, m);
}

void Thread::mbarrier_expect_tx(int where, uint32_t a, uint32_t tx) {
  at = where;
  uint8_t* p = address_of(*this, where, a);
  Mbarrier m = load(*this, where, p);
  m.tx += int32_t(tx);
  store(p, m);
}

void Thread::mbarrier_complete_tx(int where, uint32_t a, uint32_t tx) {
  at = where;
  if (hb) M.race->release(*hb, M.race->barrier_pending(address_of(*this, where, a)));
  mbarrier_complete_async(*this, where, a, tx);
}

uint32_t Thread::mbarrier_pending(uint64_t state) { return unpack(state).pending; }

// test_wait (can_block false) answers at once, try_wait may block; a try_wait that times out is
// legal, so the random policy lets some do it.
bool Thread::mbarrier_wait(int where, uint32_t a, uint32_t parity, bool can_block, int order) {
  at = where;
  if (M.planted(Plant::kMbarrierWait, where)) return true;
  if (M.planted(Plant::kParity, where)) parity ^= 1;
  uint8_t* p = address_of(*this, where, a);
  if (hb) M.race->access(*this, where, p, 8, false, true);
  if (load(*this, where, p).phase == bool(parity)) {
    if (!can_block || (M.settings.policy == Policy::kRandom && M.random(16) == 0)) {
      yield(where);
      return false;
    }
    M.mbarrier_waiters[p].push_back(this);
    async->waiting_barrier = p;
    async->waiting_parity = parity;
    block(*this, where, "mbarrier");
    if (load(*this, where, p).phase == bool(parity)) return false;
  }
  if (hb && (order & kAcquire)) M.race->acquire(*hb, M.race->barrier_completed(p));
  return true;
}

}  // namespace px
