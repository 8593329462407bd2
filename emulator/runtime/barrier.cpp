// Named barriers of a thread block and the barrier of a cluster.
#include <cstdio>

#include "machine.h"

namespace px {

void check_named_barrier(Cta& cta, int id) {
  NamedBarrier& b = cta.barriers[id];
  uint32_t const needed = b.needed ? b.needed : cta.alive;
  if (!b.arrived || b.arrived < needed) return;
  b.result = b.ones;
  b.arrived = b.needed = b.ones = 0;
  if (M.race) {
    b.released = b.clock;
    b.clock.clear();
  }
  for (Thread* t : b.waiting) M.wake(t);
  b.waiting.clear();
  M.progress();
}

static void arrive(Thread& t, int at, uint32_t id, uint32_t n, bool wait, bool v) {
  t.at = at;
  if (M.planted(Plant::kBarSync, at)) return;
  if (id > 15) t.fail(at, "barrier number above 15");
  if (n % 32) t.fail(at, "the thread count of a barrier must be a multiple of 32");
  NamedBarrier& b = t.cta->barriers[id];
  if (b.arrived && b.needed != n) t.fail(at, "threads disagree on the barrier's thread count");
  if (M.race) M.race->release(*t.hb, b.clock);
  b.needed = n;
  b.ones += v;
  if (++b.arrived > n && n) t.fail(at, "more arrivals on a barrier than its thread count");
  if (!wait) {
    check_named_barrier(*t.cta, int(id));
    return;
  }
  // wake() may queue this very thread, if its arrival completes the barrier.
  b.waiting.push_back(&t);
  t.async->state = State::kBlocked;
  check_named_barrier(*t.cta, int(id));
  static char texts[16][48];
  snprintf(texts[id], sizeof texts[id], "barrier %u (count %u)", id, n);
  block(t, at, texts[id]);
  if (M.race) M.race->acquire(*t.hb, b.released);
}

void Thread::bar_sync(int where, uint32_t id, uint32_t n) {
  arrive(*this, where, id, n, true, false);
}
void Thread::bar_arrive(int where, uint32_t id, uint32_t n) {
  arrive(*this, where, id, n, false, false);
}
uint32_t Thread::bar_red_popc(int where, uint32_t id, uint32_t n, bool v) {
  arrive(*this, where, id, n, true, v);
  return cta->barriers[id].result;
}
bool Thread::bar_red_or(int where, uint32_t id, uint32_t n, bool v) {
  return bar_red_popc(where, id, n, v) != 0;
}
bool Thread::bar_red_and(int where, uint32_t id, uint32_t n, bool v) {
  return bar_red_popc(where, id, n, !v) == 0;
}

// Waits for the threads of the cluster that have not exited.
void check_cluster_barrier(Cluster& cluster) {
  uint32_t alive = 0;
  for (auto& c : cluster.ctas) alive += c->alive;
  if (!cluster.arrived || cluster.arrived < alive) return;
  cluster.arrived = 0;
  ++cluster.generation;
  if (M.race) {
    cluster.released = cluster.clock;
    cluster.clock.clear();
  }
  for (Thread* t : cluster.waiting) M.wake(t);
  cluster.waiting.clear();
  M.progress();
}

void Thread::cluster_arrive(int where, bool release) {
  at = where;
  Cluster& cluster = *cta->cluster;
  async->cluster_phase = cluster.generation;
  if (hb && release) M.race->release(*hb, cluster.clock);
  ++cluster.arrived;
  check_cluster_barrier(cluster);
}

void Thread::cluster_wait(int where, bool acquire) {
  Cluster& cluster = *cta->cluster;
  while (cluster.generation == async->cluster_phase) {
    cluster.waiting.push_back(this);
    block(*this, where, "barrier.cluster.wait");
  }
  if (hb && acquire) M.race->acquire(*hb, cluster.released);
}

}  // namespace px
