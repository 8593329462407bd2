// State of the emulated machine, shared by the runtime's own files; kernels do not see it.
//
// One OS thread runs everything. Each CUDA thread is a fiber that runs until it blocks; each
// asynchronous operation is a closure that the scheduler runs when the policy says.
#pragma once

#include <bitset>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "race.h"
#include "thread.h"

namespace px {

constexpr uint32_t kSmemPoison = 0xffc1dead;  // a NaN as float and as two bfloat16
constexpr uint32_t kTmemPoison = 0x7fc0dead;
constexpr uint32_t kAllLanes = ~0u;

enum class State { kReady, kBlocked, kExited };
enum class Policy { kEager, kLazy, kRandom };

// Thrown on the scheduler's stack, out of the kernel launch.
struct EmulatorError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Completion of an asynchronous operation; `read` is set once its source has been read.
struct Flag {
  bool done = false, read = false;
};
using Done = std::shared_ptr<Flag>;
using Group = std::vector<Done>;

// Fiber and asynchronous bookkeeping of one thread.
struct AsyncState {
  void* sp = nullptr;
  uint8_t* stack = nullptr;
  State state = State::kReady;
  char const* waiting_for = "";
  uint8_t* waiting_barrier = nullptr;  // mbarrier of a blocked wait, for reports
  uint32_t waiting_parity = 0;
  Group cp_open, bulk_open, wgmma_open;
  std::deque<Group> cp_groups, bulk_groups, wgmma_groups;
  uint32_t cp_committed = 0, bulk_committed = 0;  // clocks of the race check
  uint32_t wgmma_committed = 0, wgmma_waits = 0;
  bool wgmma_fenced = false;  // wgmma.fence since registers may have been touched
  Group tmem_loads, tmem_stores;
  uint32_t tcgen05_committed = 0;
  std::deque<std::function<void()>> tcgen05_queue;  // mma, cp and commit, in order
  uint64_t fence_time = 0;                          // last fence.proxy.async
  uint64_t cluster_phase = 0;
};

struct Collective {
  uint64_t key = 0;
  uint32_t mask = 0, arrived = 0;
  void* arg[32];
  void (*fn)(Collective&, void const* context) = nullptr;
  void const* context = nullptr;
};

struct Warp {
  Cta* cta = nullptr;
  uint32_t id = 0;
  uint32_t alive = 0, ready = 0;
  int ready_index = -1;  // in Machine::ready_warps
  bool slow = false;
  uint32_t registers = 0;
  Thread* lanes[32] = {};
  uint32_t live = 0;  // bits of the entries of `pending` in use
  Collective pending[32];
};

struct NamedBarrier {
  uint32_t arrived = 0, needed = 0, ones = 0, result = 0;
  std::vector<Thread*> waiting;
  HbClock clock, released;
};

struct WgmmaGather {  // the 128 threads of a warpgroup on their way into one wgmma
  int at;
  FunctionInfo const* function;
  uint32_t n = 0;
  Thread* threads[128];
  std::vector<void*> d[128], a[128];
  std::vector<Thread*> blocked;
};

struct Cluster;
struct SmemWriter {  // last generic-proxy write to 16 bytes of shared memory
  Thread* thread = nullptr;
  uint64_t time = 0;
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t ctaid[3], rank, threads, smem_size, alive, sm;
  Cta* peer[kMaxClusterSize] = {};
  std::vector<std::unique_ptr<Warp>> warps;
  NamedBarrier barriers[16];
  uint32_t (*tmem)[512] = nullptr;  // [lane][column]
  uint32_t tmem_busy = 0;           // a bit for 32 columns
  bool tmem_relinquished = false;
  int64_t free_registers = 0;
  std::vector<Thread*> register_waiters;
  std::vector<SmemWriter> writers;
  std::map<int, std::unique_ptr<WgmmaGather>> wgmma_gather;  // by warpgroup
  std::map<uint32_t, uint32_t> wgmma_waits;  // of the first thread to exit, by warpgroup
  bool grid_waited = false;                  // a thread has executed griddepcontrol.wait
};

struct Cluster {
  uint32_t slot = 0;  // index of its shared window
  uint8_t* arena = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<AsyncState>> async;
  std::vector<std::unique_ptr<HbThread>> hb;
  uint32_t threads_left = 0;
  uint32_t arrived = 0;
  uint64_t generation = 1;
  std::vector<Thread*> waiting;
  HbClock clock, released;
};

// What it means if the thread block ends first: nothing for a cp.async, whose destination goes
// with it; for the others, memory that belongs to somebody else is read or written.
enum class Ending { kHarmless, kOverwrites, kStoreReads };
struct AsyncOp {
  std::function<void()> run;
  Thread* by;
  int at;
  Done done;
  Ending ending;
};

// Mistakes that can be planted in any kernel without compiling it: an instruction is left out, or
// done wrong, at one site or at all of them.
enum class Plant {
  kNothing,
  kObserve,  // only notes the sites at which a mistake could be planted
  kBarSync,
  kSyncwarp,
  kCpWait,
  kBulkWait,
  kWgmmaWait,
  kWgmmaFence,
  kProxyFence,
  kInitFence,
  kThreadFence,
  kMbarrierWait,
  kMbarrierArrive,
  kParity,
  kBytes,
  kTmemWait,
  kTcgen05Fence,
  kCommit,
  kGridWait,
};

struct Settings {
  Policy policy = Policy::kRandom;
  uint64_t seed = 1;
  uint32_t num_sms = 4;
  uint32_t compute_capability = 0;  // 0: that of the library
  bool race_check = false;
  bool proxy_check = true;
  bool tmem_load_at_issue = false, tmem_store_at_issue = false;  // relaxed tcgen05.ld / st
  bool tmem_strict = true;
  bool statistics = false;
  Plant plant = Plant::kNothing;
  int plant_at = -1;  // site, -1: all
  std::string describe() const;
};

struct Launch {
  uint32_t grid[3], block[3], cluster[3];
  uint32_t dynamic_smem;
  bool ahead = false;  // may start before the kernel before it ends
};

// What a launch has written to global memory, in units of 16 bytes.
struct Written {
  bool waited = false;  // for all kernels before it, before the next one could start
  std::unordered_map<uint64_t, std::bitset<256>> pages;
  void add(void const* p, uint32_t n);
  bool meets(void const* p, uint32_t n) const;
};

struct Statistics {
  uint64_t switches = 0, async_ops = 0, matrix_ops = 0, launches = 0;
  double seconds = 0;
};

struct Machine {
  Settings settings;
  Statistics stats;
  uint64_t rng = 1;
  void* main_sp = nullptr;
  Thread* current = nullptr;  // null while an asynchronous operation runs
  std::vector<Warp*> ready_warps;
  std::vector<Thread*> parked;  // woken after each asynchronous operation
  std::vector<AsyncOp> loose;   // asynchronous operations without an order among them
  std::vector<AsyncOp> late;    // bulk stores whose source is read as late as possible
  std::vector<Thread*> tcgen05_threads;
  std::map<std::pair<Cta*, int>, std::deque<std::function<void()>>> wgmma_queues;
  std::unordered_map<uint8_t*, std::vector<Thread*>> mbarrier_waiters;
  std::unordered_map<uint8_t*, uint64_t> mbarriers;         // what each should hold
  std::unordered_map<uint8_t*, SmemWriter> mbarrier_inits;  // not fenced yet when last seen
  std::vector<std::unique_ptr<Cluster>> clusters;           // alive
  std::vector<uint8_t*> stacks;                             // free ones
  std::vector<uint8_t*> arenas;                             // by slot
  std::vector<bool> slot_used;
  uint64_t next_cluster = 0, num_clusters = 0;  // of the launch: queue of clusters not started
  bool grid_waited = false;                     // a thread of the launch has
  Written written, written_before;              // by this launch and the one before
  KernelInfo const* kernel = nullptr;
  KernelFn code = nullptr;  // of the kernel
  Launch launch{};
  uint8_t const* params = nullptr;
  uint64_t time = 1;               // ticks of fences and writes, for the proxy check
  uint64_t idle = 0;               // polls since something else happened
  uint64_t last_progress = 0;      // in switches
  uint64_t stalled = 0;            // what loops without any switch count for, in switches
  std::string error;               // set by a fiber that failed
  Thread* asynchronous = nullptr;  // issuer of the asynchronous operation being run
  std::set<std::string> warned;
  std::unique_ptr<RaceDetector> race;
  std::vector<std::string> warnings;
  std::map<std::pair<Plant, int>, FunctionInfo const*> plantable;  // seen while observing

  ~Machine();
  bool planted(Plant what, int at) {
    if (settings.plant == Plant::kNothing) return false;
    if (settings.plant == Plant::kObserve) plantable[{what, at}] = current->function;
    return settings.plant == what && (settings.plant_at < 0 || settings.plant_at == at);
  }

  uint32_t random(uint32_t n) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return uint32_t((rng >> 11) % n);
  }
  void wake(Thread* t);
  void stored() { last_progress = stats.switches, stalled = 0; }  // a poll that stores still polls
  void progress() { last_progress = stats.switches, idle = stalled = 0; }
};
extern Machine M;

template <class T>
T take_at(std::vector<T>& v, size_t i) {
  std::swap(v[i], v.back());
  T x = std::move(v.back());
  v.pop_back();
  return x;
}

// ---- scheduler.cpp
void fiber_main();
void run_op(AsyncOp op);
void block(Thread& t, int at, char const* why);
void pass(Thread& t, int at);  // stays ready, lets others run
void wait_for(Thread& t, int at, Group const& group, char const* why, bool read_only = false);
// An unordered operation.
Done post(Thread& t, int at, std::function<void()> fn, Ending ending = Ending::kOverwrites);
Done post_store(Thread& t, int at, std::function<void()> fn);  // a bulk store
void run_kernel(KernelInfo const& kernel, Launch const& launch, uint8_t const* params);

// ---- cluster.cpp
uint32_t cluster_size(Launch const& l);
void start_next_cluster();
void finish_cluster(Cluster& cluster);
void abandon_clusters();                         // after a failure
void trim_stacks();                              // to as many as are worth keeping
bool next_cluster_to_cancel(uint32_t ctaid[3]);  // cluster launch control

// ---- report.cpp
// Where an instruction comes from: PTX line, and "file:line, inlined at file:line, ...".
struct Site {
  int ptx_line = 0;
  std::string frames;
};
Site site_of(FunctionInfo const* f, int at);
std::string describe_thread(Thread const& t, std::string const& indent);
std::string failure_text(Thread const* t, int at, std::string const& what);
std::string demangle(char const* name);
std::string deadlock_text(char const* what);
void warn(Thread& t, int at, char const* what);

// ---- memory.cpp
// Global memory is used: not what the kernel before may be using, in a launch that may run beside
// it.
bool is_ahead(Thread const& t);
void global_read(Thread& t, int at, void const* p, uint32_t n);
void global_write(Thread& t, int at, void const* p, uint32_t n);
uint8_t* shared_address(Thread& t, int at, uint32_t address, uint32_t n);
uint8_t* shared_range(Thread& t, int at, uint32_t address, uint32_t n);  // no alignment rule
void generic_write(Thread& t, uint32_t address, uint32_t n);
// The asynchronous proxy reads or writes shared memory on behalf of `t`.
void async_read(Thread& t, int at, uint32_t address, uint32_t n, HbOperation const& op);
void async_write(Thread& t, int at, uint32_t address, uint32_t n, HbOperation const& op);
void async_global(Thread& t, int at, void const* p, uint32_t n, bool write, bool strong,
                  HbOperation const& op);
HbOperation operation(Thread& t, HbOwn own);  // performed by an agent of the thread
HbOperation operation(Thread& t, HbAgent performer);

// ---- warp.cpp
enum : uint64_t { kShfl = 1, kVote, kElect, kBarWarp, kMatch, kRedux, kAligned = 1ull << 40 };
void collective(Thread& t, int at, uint64_t key, uint32_t mask, void* arg, char const* why,
                void (*fn)(Collective&, void const*), void const* context);
void complete_collectives(Warp& w);
// One lambda for all lanes; it runs once, when the last lane has arrived.
template <class Fn>
void collective(Thread& t, int at, uint64_t key, uint32_t mask, void* arg, char const* why,
                Fn const& fn) {
  collective(
      t, at, key, mask, arg, why,
      [](Collective& c, void const* f) { (*static_cast<Fn const*>(f))(c); }, &fn);
}
inline Thread* lane_of(Thread const& t, int lane) { return t.warp->lanes[lane]; }

// ---- barrier.cpp
void check_named_barrier(Cta& cta, int id);
void check_cluster_barrier(Cluster& cluster);
// ---- mbarrier.cpp
void mbarrier_check(Thread& t, int at, uint32_t address);  // initialised?
void mbarrier_add_pending(Thread& t, int at, uint32_t address);
// By asynchronous work of `t`, which has completed as `agent`.
void mbarrier_arrive_async(Thread& t, int at, uint32_t address, HbAgent const& agent);
void mbarrier_complete_async(Thread& t, int at, uint32_t address, uint32_t bytes);
std::string mbarrier_text(uint8_t const* p);
// ---- matrix.cpp
float element_to_float(Element e, uint32_t bits);
// ---- tma.cpp
void encode_tensor_map(void* out, int dtype, uint32_t rank, void* base, uint64_t const* dims,
                       uint64_t const* strides, uint32_t const* box,
                       uint32_t const* element_strides, int interleave, int swizzle, int oob);
void reduce_bytes(Thread& t, int at, Reduction r, Element e, uint8_t* dst, uint8_t const* src,
                  uint32_t n);
// ---- code.cpp
KernelFn code_of(KernelInfo const& kernel);
// ---- control.cpp
void load_environment();  // settings, once
void reset_variables();   // device variables: the first call notes their values
KernelInfo const* find_kernel(char const* name);
VariableInfo const* find_variable(char const* name);
bool is_variable(void const* p, uint32_t n);  // lies in a device variable

}  // namespace px
