// Fibers, asynchronous operations and the loop that decides what runs next.
//
// A warp is picked at random and its ready lanes run for a random number of switches. What the
// policy decides is when asynchronous work happens: at once (eager), when nothing else can run
// (lazy), or at a rate drawn for each launch (random). Clusters start in order; as many are alive
// as the given number of SMs holds, so that blocks can wait for each other but not for a block
// that has not started.
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

std::mutex launch_mutex;
sigjmp_buf fault_jump;
uint64_t fault_address;

void switch_to_scheduler(Thread& t) { px_switch(&t.async->sp, M.main_sp); }

bool async_pending() {
  return !M.loose.empty() || !M.late.empty() || !M.tcgen05_threads.empty() ||
         !M.wgmma_queues.empty();
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
  M.grid_waited = false;
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
  // The kernel behind this one takes its end for the end of all before it.
  if (l.ahead && !M.grid_waited)
    throw EmulatorError("emulator: " + demangle(M.kernel->function->name) +
                        " may start before the kernel before it ends, and has not executed "
                        "griddepcontrol.wait");
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

void fiber_main() {
  Thread* t = M.current;
  M.code(*t);
  t->exit_thread();
}

void run_op(AsyncOp op) {
  M.asynchronous = op.by;
  op.by->at = op.at;
  op.run();
  op.done->done = op.done->read = true;
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

void run_kernel(KernelInfo const& kernel, Launch const& launch, uint8_t const* params) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  auto const start = std::chrono::steady_clock::now();
  reset_queues();
  static bool const noted = (reset_variables(), true);
  (void)noted;
  M.code = code_of(kernel);
  M.kernel = &kernel;
  M.launch = launch;
  M.params = params;
  M.written_before = std::exchange(M.written, Written());
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
      abandon_clusters();
      reset_queues();
      reset_variables();
      M.written = Written();
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
