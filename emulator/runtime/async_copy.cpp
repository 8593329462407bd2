// cp.async and cp.async.bulk: groups, sources, destinations. Tensor copies are in tma.cpp.
#include <algorithm>

#include "machine.h"

namespace px {

void Thread::cp_async(int where, uint32_t dst, uint64_t src, uint32_t n, uint32_t src_n) {
  at = where;
  uint8_t* p = shared_address(*this, where, dst, n);
  generic_write(*this, dst, n);
  if (src_n > n) fail(where, "cp.async source size above the copy size");
  if (src_n && src % n) fail(where, "misaligned cp.async source");
  if (src_n && src < 65536) fail(where, "null pointer access");
  global_read(*this, where, reinterpret_cast<void const*>(src), src_n);
  HbOperation const op = operation(*this, kHbCopy);
  async->cp_open.push_back(post(
      *this, where,
      [=] {
        auto const* from = reinterpret_cast<uint8_t const*>(src);
        if (op.on) {
          M.race->async_access(*this, where, p, n, true, false, op, true);
          if (src_n) M.race->async_access(*this, where, from, src_n, false, false, op, true);
        }
        memset(p + src_n, 0, n - src_n);
        if (src_n) memcpy(p, from, src_n);
      },
      Ending::kHarmless));
}

void Thread::cp_async_commit(int where) {
  at = where;
  async->cp_groups.push_back(std::move(async->cp_open));
  async->cp_open.clear();
  ++async->cp_committed;
}

void Thread::cp_async_wait(int where, uint32_t n) {
  if (M.planted(Plant::kCpWait, where)) return;
  auto& groups = async->cp_groups;
  while (groups.size() > n) {
    wait_for(*this, where, groups.front(), "cp.async.wait_group");
    groups.pop_front();
  }
  if (hb) hb->own[kHbCopy].clock = async->cp_committed - uint32_t(groups.size());
}

void Thread::cp_async_mbarrier(int where, uint32_t a, bool noinc) {
  at = where;
  mbarrier_check(*this, where, a);
  auto all = std::make_shared<Group>(async->cp_open);
  for (Group const& g : async->cp_groups) all->insert(all->end(), g.begin(), g.end());
  if (!noinc) mbarrier_add_pending(*this, where, a);
  HbAgent agent;
  if (hb) agent = {hb->own[kHbCopy].id, async->cp_committed + 1};
  // Runs again until the copies before it are done.
  auto self = std::make_shared<std::function<void()>>();
  std::weak_ptr<std::function<void()>> const weak = self;
  *self = [=] {
    for (Done const& d : *all)
      if (!d->done) {
        auto again = weak.lock();
        post(*this, where, [again] { (*again)(); }, Ending::kHarmless);
        return;
      }
    mbarrier_arrive_async(*this, where, a, agent);
  };
  post(*this, where, [self] { (*self)(); }, Ending::kHarmless);
}

static void check_bulk(Thread& t, int at, uint64_t dst, uint64_t src, uint32_t n) {
  if ((dst | n | src) & 15) t.fail(at, "cp.async.bulk needs 16-byte alignment");
  if (n == 0) t.fail(at, "cp.async.bulk of no bytes");
}

void Thread::bulk_load(int where, uint32_t dst, uint64_t src, uint32_t n, uint32_t barrier,
                       bool multicast, uint32_t mask) {
  at = where;
  check_bulk(*this, where, dst, src, n);
  global_read(*this, where, reinterpret_cast<void const*>(src), n);
  if (!multicast) mask = 1u << (dst >> kCtaShift);
  if (mask >> cluster_size) fail(where, "multicast to a thread block outside the cluster");
  HbOperation op = operation(*this, HbAgent{});
  for (uint32_t r = 0; r < cluster_size; ++r) {
    if (!(mask >> r & 1)) continue;
    uint32_t const d = mapa(dst, r), b = multicast ? mapa(barrier, r) : barrier;
    shared_range(*this, where, d, n);
    mbarrier_check(*this, where, b);
    post(*this, where, [=]() mutable {
      if (M.race) op.performer = M.race->barrier_phase(arena + b);
      auto const* from = reinterpret_cast<uint8_t const*>(src);
      async_global(*this, where, from, n, false, false, op);
      async_write(*this, where, d, n, op);
      memcpy(arena + d, from, n);
      mbarrier_complete_async(*this, where, b, n);
    });
  }
}

void Thread::bulk_store(int where, uint64_t dst, uint32_t src, uint32_t n, Reduction r, Element e) {
  at = where;
  check_bulk(*this, where, dst, src, n);
  global_write(*this, where, reinterpret_cast<void const*>(dst), n);
  shared_range(*this, where, src, n);
  HbOperation const read = operation(*this, kHbBulkRead), write = operation(*this, kHbBulkWrite);
  async->bulk_open.push_back(post_store(*this, where, [=] {
    async_read(*this, where, src, n, read);
    auto* to = reinterpret_cast<uint8_t*>(dst);
    async_global(*this, where, to, n, true, r != Reduction::kNone, write);
    reduce_bytes(*this, where, r, e, to, arena + src, n);
  }));
}

void Thread::bulk_peer(int where, uint32_t dst, uint32_t src, uint32_t n, uint32_t barrier,
                       Reduction r, Element e) {
  at = where;
  check_bulk(*this, where, dst, src, n);
  shared_range(*this, where, src, n);
  shared_range(*this, where, dst, n);
  mbarrier_check(*this, where, barrier);
  if ((dst ^ barrier) >> kCtaShift)
    fail(where, "the barrier of a bulk copy is in another thread block than its destination");
  HbOperation op = operation(*this, HbAgent{});
  post_store(*this, where, [=]() mutable {
    if (M.race) op.performer = M.race->barrier_phase(arena + barrier);
    async_read(*this, where, src, n, op);
    async_write(*this, where, dst, n, op);
    reduce_bytes(*this, where, r, e, arena + dst, arena + src, n);
    mbarrier_complete_async(*this, where, barrier, n);
  });
}

void Thread::bulk_commit(int where) {
  at = where;
  async->bulk_groups.push_back(std::move(async->bulk_open));
  async->bulk_open.clear();
  ++async->bulk_committed;
}

void Thread::bulk_wait(int where, uint32_t n, bool read_only) {
  if (M.planted(Plant::kBulkWait, where)) return;
  auto& groups = async->bulk_groups;
  for (size_t i = 0; i + n < groups.size(); ++i)
    wait_for(*this, where, groups[i],
             read_only ? "cp.async.bulk.wait_group.read" : "cp.async.bulk.wait_group", read_only);
  auto finished = [](Group const& g) {
    return std::all_of(g.begin(), g.end(), [](Done const& d) { return d->done; });
  };
  while (groups.size() > n && finished(groups.front())) groups.pop_front();
  if (!hb) return;
  uint32_t const clock = async->bulk_committed - std::min(n, async->bulk_committed);
  hb->own[kHbBulkRead].clock = std::max(hb->own[kHbBulkRead].clock, clock);
  if (!read_only) hb->own[kHbBulkWrite].clock = std::max(hb->own[kHbBulkWrite].clock, clock);
}

}  // namespace px
