// Happens-before race check: who may have seen whose access, by vector clocks.
//
// Every agent counts its releases. Agents are threads, and the asynchronous work of a thread
// (its cp.async, bulk-read and bulk-write groups), of a warpgroup (wgmma groups), of an mbarrier
// (the copies that complete on it) and of a tcgen05 issuer. A word of memory remembers its last
// writes and the reads since; an access that is not ordered after them is a race, whatever the
// values are. Each clock exists twice: what has happened before, and what of it a proxy fence has
// made visible to the asynchronous proxy. Tensor memory has its own two fences, see race.cpp.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace px {

struct Thread;
struct Cta;
struct Cluster;
struct FunctionInfo;

struct HbAgent {  // an agent at one moment
  uint32_t id = 0, clock = 0;
};
using HbVector = std::vector<uint32_t>;

// A set of known moments, shared between threads until somebody adds to it.
struct HbClock {
  std::shared_ptr<HbVector> known, fenced;
  std::vector<std::shared_ptr<HbVector>> joined;  // whole vectors already contained
  void clear() { *this = HbClock(); }
};

enum HbOwn {
  kHbThread,
  kHbCopy,
  kHbBulkRead,
  kHbBulkWrite,
  kHbWgmma,
  kHbTcgen05,
  kHbTmemLoad,
  kHbTmemStore,
  kHbOwnCount
};

struct HbThread {
  HbAgent own[kHbOwnCount];  // what the thread knows of itself and of its own asynchronous work
  uint32_t fenced_clock = 0;
  HbClock clock;
  HbClock fence_cta, fence_gpu;      // as of the last fence: published by relaxed writes
  HbClock pending_cta, pending_gpu;  // collected by relaxed reads: acquired by the next fence
  bool has_fence_cta = false, has_fence_gpu = false;
  uint32_t tmem_told[2] = {};            // loads and stores, at the last fence::before_thread_sync
  std::shared_ptr<HbVector> tmem_known;  // at the last tcgen05.fence::after_thread_sync
};

// What the issuer of an asynchronous operation knew, and the agent that performs it.
struct HbOperation {
  std::shared_ptr<HbVector> known, fenced;
  HbAgent own[kHbOwnCount];
  uint32_t fenced_clock = 0;
  HbAgent performer;
  bool on = false;
  bool in_order = false;     // after whatever the performer did before
  bool after_reads = false;  // generic reads before it need a proxy fence, too
};

class RaceDetector {
 public:
  void start_launch();
  void start_cluster(Cluster& cluster);
  void start_thread(Thread& t, HbThread& hb);

  void release(HbThread& hb, HbClock& into);
  void merge(HbClock& into, HbClock const& from);
  void acquire(HbThread& hb, HbClock const& from);
  void grid_wait(HbThread& hb);
  bool knows_grid_wait(HbThread const& hb) const;
  void warp_barrier(Thread* const* threads, uint32_t mask);
  void fence(HbThread& hb, int scope);
  void fence_proxy(HbThread& hb);
  HbOperation operation(Thread& t, HbAgent performer);
  // Tensor memory: ld, st and what reads and writes it in the order of issue.
  HbOperation tmem_operation(Thread& t, HbAgent performer, bool in_order);
  void tmem_fence(HbThread& hb, bool after);
  void tmem_free(Thread& t, int at, uint32_t column, uint32_t columns);
  // A location used to synchronise, by relaxed, acquire and release accesses.
  void strong(Thread& t, uint8_t const* p, bool reads, bool writes, int order, int scope);

  void access(Thread& t, int at, uint8_t const* p, uint32_t n, bool write, bool strong);
  void async_access(Thread& t, int at, uint8_t const* p, uint32_t n, bool write, bool strong,
                    HbOperation const& op, bool generic_proxy = false);

  HbAgent barrier_phase(uint8_t const* barrier);  // completed by the current phase
  void barrier_init(uint8_t const* barrier);
  HbClock& barrier_pending(uint8_t const* barrier);
  void barrier_learn(uint8_t const* barrier, HbAgent const& agent);
  void barrier_complete(uint8_t const* barrier);
  HbClock const& barrier_completed(uint8_t const* barrier);

 private:
  struct Access {
    HbAgent agent;
    FunctionInfo const* function;
    int at;
    uint8_t mask;
    bool strong, async;
  };
  struct Cell {
    std::vector<Access> writes, reads;
  };
  struct Barrier {
    uint32_t agent = 0, phase = 0;
    HbClock pending, completed;
  };
  struct SyncLocation {
    HbClock gpu, cta;
    Cta const* cta_owner = nullptr;
  };
  struct Page {
    Cell cells[256];
  };

  uint32_t new_agent(std::string name);
  Cell& cell(uint64_t word);
  void forget(uint8_t const* first, uint8_t const* last);
  void join(std::shared_ptr<HbVector>& into, std::shared_ptr<HbVector> const& from);
  void add(std::shared_ptr<HbVector>& into, HbAgent const& agent);
  bool knows(HbOperation const& view, Access const& access, bool async) const;
  void touch(Thread& t, int at, uint8_t const* p, uint32_t n, bool write, Access const& access,
             HbOperation const& view);
  [[noreturn]] void report(Thread& t, int at, uint8_t const* p, bool write, Access const& now,
                           Access const& before, bool before_was_write, bool missing_proxy);

  uint32_t num_agents_ = 1;
  uint32_t grid_before_ = 0;  // agent: the end of the grids that this launch depends on
  std::deque<std::string> names_{"nobody"};
  std::map<std::string, uint32_t> reusable_;
  std::vector<uint32_t> clocks_;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  std::unordered_map<uint8_t const*, Barrier> barriers_;
  std::unordered_map<uint8_t const*, SyncLocation> locations_;
  struct Memo {
    std::shared_ptr<HbVector> a, b, result;
  };
  Memo memo_[16];
  uint32_t memo_next_ = 0;
};

}  // namespace px
