// Fibers, asynchronous operations and the loop that decides what runs next.
//
// A warp is picked at random and its ready lanes run for a random number of switches. What the
// policy decides is when asynchronous work happens: at once (eager), when nothing else can run
// (lazy), or at a rate drawn for each launch (random). Clusters start in order; as many are alive
// as the given number of SMs holds, so that blocks can wait for each other but not for a block
// that has not started.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "fiber.h"
#include "machine.h"

namespace px {

Machine M;

namespace {

constexpr uint32_t kFuel = 1u << 20;         // backward branches a turn
constexpr uint64_t kNoProgress = 4'000'000;  // switches without any effect: a live lock
constexpr uint64_t kFuelPenalty = kNoProgress / 64;
constexpr size_t kStacksKept = 1024;  // two memory maps each, and a process has 65530 of them

std::mutex launch_mutex;
sigjmp_buf fault_jump;
uint64_t fault_address;

void switch_to_scheduler(Thread& t) { px_switch(&t.async->sp, M.main_sp); }

void fiber_main() {
  Thread* t = M.current;
  M.kernel->fn(*t);
  t->exit_thread();
}

bool async_pending() {
  return !M.loose.empty() || !M.late.empty() || !M.tcgen05_threads.empty() ||
         !M.wgmma_queues.empty();
}

template <class T>
T take_at(std::vector<T>& v, size_t i) {
  std::swap(v[i], v.back());
  T x = std::move(v.back());
  v.pop_back();
  return x;
}

void run_op(AsyncOp op) {
  M.asynchronous = op.by;
  op.by->at = op.at;
  op.run();
  op.done->done = op.done->read = true;
}

// Bulk stores come last: nothing but their own wait makes them read their source.
void run_async() {
  ++M.stats.async_ops;
  M.progress();
  uint32_t const n = uint32_t(M.loose.size() + M.tcgen05_threads.size() + M.wgmma_queues.size());
  if (n == 0) {
    run_op(take_at(M.late, M.random(uint32_t(M.late.size()))));
  } else {
    uint32_t i = M.random(n);
    if (i < M.loose.size()) {
      run_op(take_at(M.loose, i));
    } else if ((i -= uint32_t(M.loose.size())) < M.tcgen05_threads.size()) {
      Thread* t = M.tcgen05_threads[i];
      auto fn = std::move(t->async->tcgen05_queue.front());
      t->async->tcgen05_queue.pop_front();
      if (t->async->tcgen05_queue.empty()) take_at(M.tcgen05_threads, i);
      M.asynchronous = t;
      fn();
    } else {
      auto it = M.wgmma_queues.begin();
      std::advance(it, i - M.tcgen05_threads.size());
      auto fn = std::move(it->second.front());
      it->second.pop_front();
      if (it->second.empty()) M.wgmma_queues.erase(it);
      fn();
    }
  }
  M.asynchronous = nullptr;
  for (Thread* t : M.parked) M.wake(t);
  M.parked.clear();
}

[[noreturn]] void deadlock(char const* what) { throw EmulatorError(deadlock_text(what)); }

// ---- clusters ------------------------------------------------------------------------------

uint32_t cluster_size(Launch const& l) { return l.cluster[0] * l.cluster[1] * l.cluster[2]; }

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
  c->free_registers = 65536 - int64_t(regs) * padded;
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
  t.fuel = kFuel;
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

void start_next_cluster() {
  uint32_t base[3];
  cluster_coordinates(M.next_cluster++, base);
  start_cluster(base);
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
  for (auto& a : cluster.async) M.stacks.push_back(a->stack);
  for (auto& c : cluster.ctas) free(c->tmem);
  M.slot_used[cluster.slot] = false;
  uint8_t* const end = cluster.arena + size_t(kMaxClusterSize) * kCtaStride;
  for (auto it = M.mbarriers.begin(); it != M.mbarriers.end();)
    it = it->first >= cluster.arena && it->first < end ? M.mbarriers.erase(it) : ++it;
  for (auto it = M.mbarrier_inits.begin(); it != M.mbarrier_inits.end();)
    it = it->first >= cluster.arena && it->first < end ? M.mbarrier_inits.erase(it) : ++it;
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
void abandon() {
  for (auto& c : M.clusters) free_cluster(*c);
  M.clusters.clear();
  M.mbarrier_inits.clear();
  trim_stacks();
}

void reset_queues() {
  M.ready_warps.clear();
  M.parked.clear();
  M.loose.clear();
  M.late.clear();
  M.tcgen05_threads.clear();
  M.wgmma_queues.clear();
  M.mbarrier_waiters.clear();
  M.current = M.asynchronous = nullptr;
  M.progress();
  M.error.clear();
}

// ---- the loop ------------------------------------------------------------------------------

void run_thread(Thread& t) {
  M.current = &t;
  t.async->state = State::kReady;
  t.fuel = kFuel;
  ++M.stats.switches;
  px_switch(&M.main_sp, t.async->sp);
  M.current = nullptr;
  if (!M.error.empty()) throw EmulatorError(M.error);
  if (t.async->state != State::kExited) return;
  M.progress();
  Cluster& cluster = *t.cta->cluster;
  if (--cluster.threads_left == 0) {
    finish_cluster(cluster);
    if (M.next_cluster < M.num_clusters) start_next_cluster();
  }
}

Warp* pick_warp() {
  uint32_t const n = uint32_t(M.ready_warps.size());
  uint32_t i = M.random(n);
  for (int k = 0; k < 4 && M.ready_warps[i]->slow; ++k) i = M.random(n);
  return M.ready_warps[i];
}

Thread* take_lane(Warp& w) {
  uint32_t const start = M.random(32);
  uint32_t const rotated = w.ready >> start | (start ? w.ready << (32 - start) : 0);
  uint32_t const lane = (start + uint32_t(__builtin_ctz(rotated))) % 32;
  w.ready &= ~(1u << lane);
  if (w.ready == 0) {
    Warp* last = M.ready_warps.back();
    M.ready_warps[size_t(w.ready_index)] = last;
    last->ready_index = w.ready_index;
    M.ready_warps.pop_back();
    w.ready_index = -1;
  }
  return w.lanes[lane];
}

void run_launch() {
  M.next_cluster = 0;
  Launch const& l = M.launch;
  M.num_clusters = uint64_t(l.grid[0]) * l.grid[1] * l.grid[2] / cluster_size(l);
  uint32_t const resident = std::max(1u, M.settings.num_sms / cluster_size(l));
  while (M.next_cluster < M.num_clusters && M.clusters.size() < resident) start_next_cluster();
  uint32_t const rate = 2u << M.random(10);  // random policy: how slow asynchronous units are
  bool const eager = M.settings.policy == Policy::kEager;
  bool const random = M.settings.policy == Policy::kRandom;
  while (!M.clusters.empty()) {
    uint64_t const silence = M.stats.switches - M.last_progress + M.stalled;
    bool const stuck = M.ready_warps.empty() || M.idle > 128 * M.ready_warps.size() + 64 ||
                       silence > 4096 * M.ready_warps.size() + 65536;
    if (async_pending() && (eager || stuck || (random && M.random(rate) == 0))) {
      run_async();
      continue;
    }
    if (M.ready_warps.empty()) deadlock("no thread can run and no asynchronous work is pending");
    if (M.idle > kNoProgress / 4 || silence > kNoProgress)
      deadlock("threads poll for something that never happens");
    Warp* w = pick_warp();
    uint32_t quantum = 32u << M.random(6);
    uint64_t const idle = M.idle;
    // The warp may be gone once its cluster has finished: ask the ready list, not the warp.
    for (bool again = true; again;) {
      Cluster* const cluster = w->cta->cluster;
      bool const last = cluster->threads_left == 1;
      run_thread(*take_lane(*w));
      again = !last && w->ready && --quantum && M.idle == idle &&
              !(async_pending() && (eager || (random && M.random(rate) == 0)));
    }
  }
}

// ---- faults --------------------------------------------------------------------------------

struct sigaction old_segv, old_bus;
bool running = false;
alignas(16) char signal_stack[64 << 10];

void on_fault(int signal, siginfo_t* info, void*) {
  if (!running) {
    sigaction(signal, signal == SIGSEGV ? &old_segv : &old_bus, nullptr);
    return;
  }
  fault_address = uint64_t(info->si_addr);
  siglongjmp(fault_jump, 1);
}

// On the scheduler's stack: a signal handler must not allocate.
std::string fault_text() {
  Thread* t = M.current ? M.current : M.asynchronous;
  char what[96];
  bool const guard = t && fault_address - uint64_t(t->async->stack) < 4096;
  snprintf(what, sizeof what, guard ? "stack overflow" : "invalid memory access, address 0x%llx",
           static_cast<unsigned long long>(fault_address));
  return failure_text(t, t ? t->at : 0, what);
}

struct FaultGuard {
  stack_t old_stack;
  FaultGuard() {
    stack_t s{};
    s.ss_sp = signal_stack;
    s.ss_size = sizeof signal_stack;
    sigaltstack(&s, &old_stack);
    struct sigaction a{};
    a.sa_sigaction = on_fault;
    a.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &a, &old_segv);
    sigaction(SIGBUS, &a, &old_bus);
    running = true;
  }
  ~FaultGuard() {
    running = false;
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    sigaltstack(&old_stack, nullptr);
  }
};

}  // namespace

Machine::~Machine() {
  for (uint8_t* stack : stacks) free_stack(stack);
}

void Machine::wake(Thread* t) {
  if (t->async->state != State::kBlocked) return;
  t->async->state = State::kReady;
  Warp& w = *t->warp;
  w.ready |= 1u << t->lane;
  if (w.ready_index < 0) {
    w.ready_index = int(ready_warps.size());
    ready_warps.push_back(&w);
  }
}

void block(Thread& t, int at, char const* why) {
  t.at = at;
  t.async->waiting_for = why;
  t.async->state = State::kBlocked;
  switch_to_scheduler(t);
  t.async->waiting_for = "";
  t.async->waiting_barrier = nullptr;
}

void pass(Thread& t, int at) {
  t.at = at;
  t.async->state = State::kBlocked;
  M.wake(&t);
  switch_to_scheduler(t);
}

void Thread::yield(int where) {
  ++M.idle;
  pass(*this, where);
}

void Thread::out_of_fuel(int where) {
  M.stalled += kFuelPenalty;
  fuel = kFuel;
  yield(where);
}

uint32_t Thread::clock(int where) {
  ++M.idle;
  at = where;
  return uint32_t(M.stats.switches);
}

void Thread::exit_thread() {
  AsyncState& a = *async;
  for (Group const& g : a.wgmma_groups)
    for (Done const& d : g)
      if (!d->done) fail(at, "exit with wgmma in flight");
  for (Done const& d : a.wgmma_open)
    if (!d->done) fail(at, "exit with wgmma in flight");
  for (Done const& d : a.tmem_loads)
    if (!d->done) fail(at, "exit with tcgen05.ld in flight");
  if (a.wgmma_committed) {
    auto [it, first] = cta->wgmma_waits.try_emplace(warp_id / 4, a.wgmma_waits);
    if (!first && it->second != a.wgmma_waits)
      fail(at, "wgmma.wait_group was executed by some warps of the warpgroup only");
  }
  a.state = State::kExited;
  --cta->alive;
  warp->alive &= ~(1u << lane);
  complete_collectives(*warp);
  for (int i = 0; i < 16; ++i) check_named_barrier(*cta, i);
  check_cluster_barrier(*cta->cluster);
  switch_to_scheduler(*this);
  __builtin_unreachable();
}

bool Thread::is_local(uint64_t g) { return g - uint64_t(async->stack) < kStackSize; }

void Thread::fail(int where, char const* what) {
  std::string const text = failure_text(this, where, what);
  if (!M.current) throw EmulatorError(text);
  M.error = text;
  switch_to_scheduler(*M.current);
  __builtin_unreachable();
}

Done post(Thread& t, int at, std::function<void()> fn, Ending ending) {
  auto done = std::make_shared<Flag>();
  M.loose.push_back({std::move(fn), &t, at, done, ending});
  return done;
}

Done post_store(Thread& t, int at, std::function<void()> fn) {
  bool const late = M.settings.policy == Policy::kLazy ||
                    (M.settings.policy == Policy::kRandom && M.random(2) == 0);
  auto done = std::make_shared<Flag>();
  (late ? M.late : M.loose).push_back({std::move(fn), &t, at, done, Ending::kStoreReads});
  return done;
}

void wait_for(Thread& t, int at, Group const& group, char const* why, bool read_only) {
  for (;;) {
    bool all = true;
    for (Done const& d : group)
      if (!(d->done || (read_only && d->read))) all = false;
    if (all) return;
    M.parked.push_back(&t);
    block(t, at, why);
  }
}

bool next_cluster_to_cancel(uint32_t ctaid[3]) {
  if (M.next_cluster >= M.num_clusters) return false;
  cluster_coordinates(M.next_cluster++, ctaid);
  return true;
}

void run_kernel(KernelInfo const& kernel, Launch const& launch, uint8_t const* params) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  auto const start = std::chrono::steady_clock::now();
  reset_queues();
  static bool const noted = (reset_variables(), true);
  (void)noted;
  M.kernel = &kernel;
  M.launch = launch;
  M.params = params;
  // The same kernel is scheduled the same way whatever ran before: a failing test fails alone.
  M.rng = (M.settings.seed + 1) * 0x2545f4914f6cdd1dull ^ 0x9e3779b97f4a7c15ull;
  for (int i = 0; i < 8; ++i) M.random(2);
  if (M.settings.race_check && !M.race) M.race = std::make_unique<RaceDetector>();
  if (!M.settings.race_check) M.race.reset();
  if (M.race) M.race->start_launch();
  ++M.stats.launches;
  {
    FaultGuard guard;
    bool const faulted = sigsetjmp(fault_jump, 1) != 0;
    try {
      if (faulted) throw EmulatorError(fault_text());
      run_launch();
    } catch (...) {
      abandon();
      reset_queues();
      reset_variables();
      throw;
    }
  }
  trim_stacks();
  M.stats.seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (M.settings.statistics)
    fprintf(stderr, "emulator: %s: %.3f s in all, %llu switches, %llu asynchronous, %llu matrix\n",
            demangle(kernel.function->name).substr(0, 80).c_str(), M.stats.seconds,
            static_cast<unsigned long long>(M.stats.switches),
            static_cast<unsigned long long>(M.stats.async_ops),
            static_cast<unsigned long long>(M.stats.matrix_ops));
}

}  // namespace px
