// Thread blocks and threads of a launch: started in order, taken down when all of a cluster is
// done.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "fiber.h"
#include "machine.h"

namespace px {
namespace {

// Of a library; two memory maps each, of which a process has 65530 for all libraries it loads.
constexpr size_t kStacksKept = 128;

uint32_t take_slot() {
  for (uint32_t i = 0; i < M.slot_used.size(); ++i)
    if (!M.slot_used[i]) return M.slot_used[i] = true, i;
  size_t const bytes = size_t(kMaxClusterSize + 1) * kCtaStride;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw EmulatorError("emulator: no address space for shared memory");
  M.arenas.push_back(
      reinterpret_cast<uint8_t*>((uint64_t(p) + kCtaStride - 1) & ~uint64_t(kCtaStride - 1)));
  M.slot_used.push_back(true);
  return uint32_t(M.arenas.size() - 1);
}

void cluster_coordinates(uint64_t index, uint32_t out[3]) {
  for (int i = 0; i < 3; ++i) {
    uint32_t const n = M.launch.grid[i] / M.launch.cluster[i];
    out[i] = uint32_t(index % n) * M.launch.cluster[i];
    index /= n;
  }
}

std::unique_ptr<Cta> new_cta(Cluster& cluster, uint32_t rank, uint32_t const base[3]) {
  Launch const& l = M.launch;
  auto c = std::make_unique<Cta>();
  c->cluster = &cluster;
  c->rank = rank;
  c->ctaid[0] = base[0] + rank % l.cluster[0];
  c->ctaid[1] = base[1] + rank / l.cluster[0] % l.cluster[1];
  c->ctaid[2] = base[2] + rank / l.cluster[0] / l.cluster[1];
  c->threads = c->alive = l.block[0] * l.block[1] * l.block[2];
  c->smem_size = M.kernel->dynamic_smem_offset + l.dynamic_smem;
  c->sm = (cluster.slot * cluster_size(l) + rank) % std::max(1u, M.settings.num_sms);
  uint32_t const padded = (c->threads + 31) / 32 * 32;
  uint32_t const regs = std::min(255u, 65536u / padded) / 8 * 8;
  c->free_registers = 0;  // what the launch's even shares leave of the SM's file is not its own
  c->writers.assign(c->smem_size / 16 + 2, SmemWriter{});
  if (M.settings.compute_capability >= 100) {
    c->tmem = static_cast<uint32_t (*)[512]>(aligned_alloc(1024, 128 * 512 * 4));
    std::fill_n(&c->tmem[0][0], 128 * 512, kTmemPoison);
  }
  auto* smem = reinterpret_cast<uint32_t*>(cluster.arena + size_t(rank) * kCtaStride);
  std::fill_n(smem, (c->smem_size + 3) / 4, kSmemPoison);
  for (uint32_t w = 0; w < padded / 32; ++w) {
    c->warps.push_back(std::make_unique<Warp>());
    Warp& warp = *c->warps.back();
    warp.cta = c.get();
    warp.id = w;
    warp.registers = regs;
    warp.slow = M.settings.policy == Policy::kRandom && M.random(4) == 0;
  }
  return c;
}

void new_thread(Cluster& cluster, Cta& c, uint32_t linear, uint32_t const base[3]) {
  Launch const& l = M.launch;
  cluster.threads.push_back(std::make_unique<Thread>());
  cluster.async.push_back(std::make_unique<AsyncState>());
  Thread& t = *cluster.threads.back();
  t.async = cluster.async.back().get();
  t.tid[0] = linear % l.block[0];
  t.tid[1] = linear / l.block[0] % l.block[1];
  t.tid[2] = linear / l.block[0] / l.block[1];
  t.linear = linear;
  t.lane = linear % 32;
  t.warp_id = linear / 32;
  t.cta = &c;
  t.warp = c.warps[t.warp_id].get();
  t.function = M.kernel->function;
  t.params = M.params;
  t.arena = cluster.arena;
  t.smem_tag = c.rank << kCtaShift;
  t.at = 0;
  t.rank = c.rank;
  t.cluster_size = cluster_size(l);
  t.sm_id = c.sm;
  t.num_sms = M.settings.num_sms;
  t.dynamic_smem = l.dynamic_smem;
  t.total_smem = c.smem_size;
  t.num_warps = uint32_t(c.warps.size());
  for (int i = 0; i < 3; ++i) {
    t.ntid[i] = l.block[i];
    t.ctaid[i] = c.ctaid[i];
    t.nctaid[i] = l.grid[i];
    t.cluster_ctaid[i] = c.ctaid[i] - base[i];
    t.cluster_nctaid[i] = l.cluster[i];
    t.clusterid[i] = base[i] / l.cluster[i];
    t.nclusterid[i] = l.grid[i] / l.cluster[i];
  }
  t.hb = nullptr;
  if (M.race) {
    cluster.hb.push_back(std::make_unique<HbThread>());
    t.hb = cluster.hb.back().get();
  }
  t.warp->lanes[t.lane] = &t;
  t.warp->alive |= 1u << t.lane;
  if (M.stacks.empty()) M.stacks.push_back(new_stack());
  t.async->stack = M.stacks.back();
  M.stacks.pop_back();
  t.async->sp = prepare_stack(t.async->stack, fiber_main);
  t.async->state = State::kBlocked;
  M.wake(&t);
}

void start_cluster(uint32_t const base[3]) {
  M.clusters.push_back(std::make_unique<Cluster>());
  Cluster& cluster = *M.clusters.back();
  cluster.slot = take_slot();
  cluster.arena = M.arenas[cluster.slot];
  uint32_t const n = cluster_size(M.launch);
  for (uint32_t r = 0; r < n; ++r) cluster.ctas.push_back(new_cta(cluster, r, base));
  if (M.race) M.race->start_cluster(cluster);
  for (auto& c : cluster.ctas) {
    for (uint32_t r = 0; r < n; ++r) c->peer[r] = cluster.ctas[r].get();
    for (uint32_t i = 0; i < c->threads; ++i) new_thread(cluster, *c, i, base);
  }
  if (M.race)
    for (auto& t : cluster.threads) M.race->start_thread(*t, *t->hb);
  cluster.threads_left = uint32_t(cluster.threads.size());
}

bool belongs(Thread const* t, Cluster const& c) { return t->cta->cluster == &c; }

void drain(Cluster& cluster) {
  for (auto const* queue : {&M.late, &M.loose})
    for (AsyncOp const& op : *queue) {
      if (!belongs(op.by, cluster)) continue;
      if (op.ending == Ending::kStoreReads)
        throw EmulatorError(failure_text(
            op.by, op.at,
            "the thread block ended while a bulk store may still read its shared memory "
            "(missing cp.async.bulk.wait_group)"));
      if (op.ending == Ending::kOverwrites)
        throw EmulatorError(failure_text(
            op.by, op.at, "the thread block ended with this asynchronous operation in flight"));
      warn(*op.by, op.at, "the thread block ended with this cp.async in flight");
      break;
    }
  for (size_t i = 0; i < M.loose.size();)
    if (belongs(M.loose[i].by, cluster)) {
      run_op(take_at(M.loose, i));
      i = 0;
    } else {
      ++i;
    }
  for (size_t i = 0; i < M.tcgen05_threads.size();) {
    Thread* t = M.tcgen05_threads[i];
    if (!belongs(t, cluster)) {
      ++i;
      continue;
    }
    M.asynchronous = t;
    for (auto& fn : t->async->tcgen05_queue) fn();
    t->async->tcgen05_queue.clear();
    take_at(M.tcgen05_threads, i);
  }
  M.asynchronous = nullptr;
}

void free_cluster(Cluster& cluster) {
  for (auto& a : cluster.async)
    if (a->stack) M.stacks.push_back(a->stack);
  for (auto& c : cluster.ctas) free(c->tmem);
  M.slot_used[cluster.slot] = false;
  uint8_t* const end = cluster.arena + size_t(kMaxClusterSize) * kCtaStride;
  for (auto it = M.mbarriers.begin(); it != M.mbarriers.end();)
    it = it->first >= cluster.arena && it->first < end ? M.mbarriers.erase(it) : ++it;
  for (auto it = M.mbarrier_inits.begin(); it != M.mbarrier_inits.end();)
    it = it->first >= cluster.arena && it->first < end ? M.mbarrier_inits.erase(it) : ++it;
}

}  // namespace

uint32_t cluster_size(Launch const& l) { return l.cluster[0] * l.cluster[1] * l.cluster[2]; }

void start_next_cluster() {
  uint32_t base[3];
  cluster_coordinates(M.next_cluster++, base);
  start_cluster(base);
}

void finish_cluster(Cluster& cluster) {
  drain(cluster);
  for (auto& c : cluster.ctas)
    if (c->tmem_busy)
      throw EmulatorError(failure_text(cluster.threads[0].get(), cluster.threads[0]->at,
                                       "tensor memory was not deallocated before the exit"));
  free_cluster(cluster);
  for (size_t i = 0; i < M.clusters.size(); ++i)
    if (M.clusters[i].get() == &cluster) {
      M.clusters.erase(M.clusters.begin() + long(i));
      break;
    }
}

void trim_stacks() {
  for (; M.stacks.size() > kStacksKept; M.stacks.pop_back()) free_stack(M.stacks.back());
}

// After a failure: fibers are abandoned where they stand.
void abandon_clusters() {
  for (auto& c : M.clusters) free_cluster(*c);
  M.clusters.clear();
  M.mbarrier_inits.clear();
  trim_stacks();
}

bool next_cluster_to_cancel(uint32_t ctaid[3]) {
  if (M.next_cluster >= M.num_clusters) return false;
  cluster_coordinates(M.next_cluster++, ctaid);
  return true;
}

Machine::~Machine() {
  for (uint8_t* stack : stacks) free_stack(stack);
}

}  // namespace px
