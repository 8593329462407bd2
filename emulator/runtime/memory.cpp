// Checks of shared and global accesses, the proxy rule, and the hooks of the race check.
#include "machine.h"

namespace px {

uint8_t* shared_range(Thread& t, int at, uint32_t address, uint32_t n) {
  uint32_t const offset = address & (kCtaStride - 1), rank = address >> kCtaShift;
  if (rank >= t.cluster_size || offset + n > t.cta->smem_size)
    t.fail(at, "shared memory access out of bounds");
  Cta const* owner = t.cta->peer[rank];
  if (owner != t.cta && !owner->alive)
    t.fail(at, "access to the shared memory of a thread block that has ended");
  return t.arena + address;
}

uint8_t* shared_address(Thread& t, int at, uint32_t address, uint32_t n) {
  if ((n & (n - 1)) == 0 && n <= 16 && (address & (n - 1)))
    t.fail(at, "misaligned shared memory access");
  return shared_range(t, at, address, n);
}

// Written through the generic proxy: the asynchronous proxy may read it after a fence.
void generic_write(Thread& t, uint32_t address, uint32_t n) {
  if (!M.settings.proxy_check) return;
  Cta* c = t.cta->peer[address >> kCtaShift];
  uint32_t const offset = address & (kCtaStride - 1);
  uint64_t const now = ++M.time;
  for (uint32_t k = offset >> 4; k <= (offset + n - 1) >> 4; ++k) c->writers[k] = {&t, now};
}

void async_read(Thread& t, int at, uint32_t address, uint32_t n, HbOperation const& op) {
  uint8_t* p = shared_range(t, at, address, n);
  if (M.settings.proxy_check) {
    Cta* c = t.cta->peer[address >> kCtaShift];
    uint32_t const offset = address & (kCtaStride - 1);
    for (uint32_t k = offset >> 4; k <= (offset + n - 1) >> 4; ++k) {
      SmemWriter const& w = c->writers[k];
      if (w.thread && w.thread->async->fence_time < w.time && t.async->fence_time < w.time) {
        std::string const what =
            "the async proxy reads shared memory that warp " + std::to_string(w.thread->warp_id) +
            ", lane " + std::to_string(w.thread->lane) + " wrote without a fence.proxy.async";
        t.fail(at, what.c_str());
      }
    }
  }
  if (op.on) M.race->async_access(t, at, p, n, false, false, op);
}

void async_write(Thread& t, int at, uint32_t address, uint32_t n, HbOperation const& op) {
  uint8_t* p = shared_range(t, at, address, n);
  if (M.settings.proxy_check) {
    Cta* c = t.cta->peer[address >> kCtaShift];
    uint32_t const offset = address & (kCtaStride - 1);
    for (uint32_t k = offset >> 4; k <= (offset + n - 1) >> 4; ++k) c->writers[k].thread = nullptr;
  }
  if (op.on) M.race->async_access(t, at, p, n, true, false, op);
}

void async_global(Thread& t, int at, void const* p, uint32_t n, bool write, bool strong,
                  HbOperation const& op) {
  if (op.on && n) M.race->async_access(t, at, static_cast<uint8_t const*>(p), n, write, strong, op);
}

HbOperation operation(Thread& t, HbAgent performer) {
  return M.race ? M.race->operation(t, performer) : HbOperation{};
}

// The group that is open now will be number `committed + 1`.
HbOperation operation(Thread& t, HbOwn own) {
  if (!M.race) return {};
  uint32_t const clock = own == kHbCopy ? t.async->cp_committed + 1 : t.async->bulk_committed + 1;
  return M.race->operation(t, {t.hb->own[own].id, clock});
}

uint8_t* Thread::load_shared(int where, uint32_t address, uint32_t n) {
  at = where;
  uint8_t* p = shared_address(*this, where, address, n);
  if (hb) M.race->access(*this, where, p, n, false, false);
  return p;
}

uint8_t* Thread::store_shared(int where, uint32_t address, uint32_t n) {
  at = where;
  uint8_t* p = shared_address(*this, where, address, n);
  generic_write(*this, address, n);
  if (hb) M.race->access(*this, where, p, n, true, false);
  M.stored();
  return p;
}

// ---- launches that may start before the kernel before them ends ----------------------------

void Written::add(void const* p, uint32_t n) {
  uint64_t page = ~uint64_t(0);
  std::bitset<256>* bits = nullptr;
  for (uint64_t u = uint64_t(p) >> 4; u <= (uint64_t(p) + n - 1) >> 4; ++u) {
    if (u >> 8 != page) bits = &pages[page = u >> 8];
    bits->set(u & 255);
  }
}

bool Written::meets(void const* p, uint32_t n) const {
  for (uint64_t u = uint64_t(p) >> 4; u <= (uint64_t(p) + n - 1) >> 4; ++u) {
    auto const it = pages.find(u >> 8);
    if (it != pages.end() && it->second[u & 255]) return true;
  }
  return false;
}

// The kernel before may still run. The race check knows who has heard of a wait; without it, one by
// any thread of the block is taken for enough.
bool is_ahead(Thread const& t) {
  if (!M.launch.ahead) return false;
  return M.race ? !M.race->knows_grid_wait(*t.hb) : !t.cta->grid_waited;
}

// Parameters belong to the launch, and stacks to its threads.
static bool is_own(Thread& t, void const* p) {
  return t.is_local(uint64_t(p)) || uint64_t(p) - uint64_t(t.params) < M.kernel->param_bytes;
}

void global_read(Thread& t, int at, void const* p, uint32_t n) {
  if (!n || !is_ahead(t) || is_own(t, p)) return;
  // Behind a kernel that has itself waited for those before it, only what it writes is not there
  // yet. What a kernel from elsewhere writes is not known.
  if (!M.written_before.waited)
    t.fail(at, "global memory is read before griddepcontrol.wait, beside an unknown kernel");
  if (M.written_before.meets(p, n))
    t.fail(at, "what the kernel before writes is read before griddepcontrol.wait");
}

void global_write(Thread& t, int at, void const* p, uint32_t n) {
  if (!n || is_own(t, p)) return;
  // A device variable is no memory of the caller's: a counter, say, that only this kernel uses.
  if (is_ahead(t) &&
      !(is_variable(p, n) && M.written_before.waited && !M.written_before.meets(p, n)))
    t.fail(at, "global memory is written before griddepcontrol.wait");
  M.written.add(p, n);
}

void Thread::griddep_wait(int where) {
  at = where;
  if (M.planted(Plant::kGridWait, where)) return;
  cta->grid_waited = M.grid_waited = true;
  M.written.waited = M.launch.ahead;
  if (hb) M.race->grid_wait(*hb);
}

void Thread::griddep_launch_dependents(int where) {
  at = where;
  if (is_ahead(*this))
    fail(where,
         "griddepcontrol.launch_dependents before griddepcontrol.wait: the next kernel "
         "would not wait for all before it");
  M.written.waited = true;
}

// ---- accesses ------------------------------------------------------------------------------

static uint8_t* global_address(Thread& t, int at, uint64_t address, uint32_t n) {
  t.at = at;
  if (address < 65536) t.fail(at, "null pointer access");
  if ((n & (n - 1)) == 0 && n <= 16 && (address & (n - 1)))
    t.fail(at, "misaligned global memory access");
  return reinterpret_cast<uint8_t*>(address);
}

uint8_t* Thread::load_global(int where, uint64_t address, uint32_t n) {
  if (is_shared(address)) return load_shared(where, uint32_t(to_shared(address)), n);
  uint8_t* p = global_address(*this, where, address, n);
  global_read(*this, where, p, n);
  if (hb && !is_local(address)) M.race->access(*this, where, p, n, false, false);
  return p;
}

uint8_t* Thread::store_global(int where, uint64_t address, uint32_t n) {
  if (is_shared(address)) return store_shared(where, uint32_t(to_shared(address)), n);
  uint8_t* p = global_address(*this, where, address, n);
  global_write(*this, where, p, n);
  if (hb && !is_local(address)) M.race->access(*this, where, p, n, true, false);
  M.stored();
  return p;
}

static uint8_t* strong_address(Thread& t, int at, bool shared, uint64_t address, uint32_t n,
                               bool writes) {
  t.at = at;
  if (!shared && t.is_shared(address)) {
    shared = true;
    address = t.to_shared(address);
  }
  if (!shared) {
    uint8_t* p = global_address(t, at, address, n);
    (writes ? global_write : global_read)(t, at, p, n);
    return p;
  }
  uint8_t* p = shared_address(t, at, uint32_t(address), n);
  if (writes) generic_write(t, uint32_t(address), n);
  return p;
}

// Strong loads are what polling loops are made of: let others run, so that polls end.
uint8_t* Thread::load_strong(int where, bool shared, uint64_t address, uint32_t n, int order,
                             int scope) {
  yield(where);
  uint8_t* p = strong_address(*this, where, shared, address, n, false);
  if (hb) {
    M.race->strong(*this, p, true, false, order, scope);
    M.race->access(*this, where, p, n, false, true);
  }
  return p;
}

uint8_t* Thread::store_strong(int where, bool shared, uint64_t address, uint32_t n, int order,
                              int scope) {
  uint8_t* p = strong_address(*this, where, shared, address, n, true);
  if (hb) {
    M.race->access(*this, where, p, n, true, true);
    M.race->strong(*this, p, false, true, order, scope);
  }
  M.stored();
  return p;
}

uint8_t* Thread::atomic(int where, bool shared, uint64_t address, uint32_t n, int order,
                        int scope) {
  yield(where);
  uint8_t* p = strong_address(*this, where, shared, address, n, true);
  if (hb) {
    M.race->access(*this, where, p, n, true, true);
    M.race->strong(*this, p, true, true, order, scope);
  }
  return p;
}

void Thread::fence(int where, int scope) {
  at = where;
  if (M.planted(Plant::kThreadFence, where)) return;
  if (hb) M.race->fence(*hb, scope);
}

void Thread::fence_proxy_async(int where) {
  at = where;
  if (M.planted(Plant::kProxyFence, where)) return;
  async->fence_time = ++M.time;
  if (hb) M.race->fence_proxy(*hb);
}

void Thread::fence_mbarrier_init(int where) {
  at = where;
  if (M.planted(Plant::kInitFence, where)) return;
  for (auto it = M.mbarrier_inits.begin(); it != M.mbarrier_inits.end();)
    it = it->second.thread == this ? M.mbarrier_inits.erase(it) : ++it;
}

void Thread::store_async(int where, uint32_t address, uint64_t const* values, uint32_t n,
                         uint32_t size, uint32_t barrier) {
  at = where;
  shared_address(*this, where, address, size);
  shared_address(*this, where, barrier, 8);
  mbarrier_check(*this, where, barrier);
  if ((address ^ barrier) >> kCtaShift)
    fail(where, "st.async: the barrier is in another thread block than the data");
  std::vector<uint64_t> const v(values, values + n);
  HbOperation op = operation(*this, HbAgent{});
  post(*this, where, [=]() mutable {
    for (uint32_t i = 0; i < n; ++i) {
      uint32_t const a = address + i * size;
      memcpy(shared_range(*this, where, a, size), &v[i], size);
      if (M.race) op.performer = M.race->barrier_phase(arena + barrier);
      async_write(*this, where, a, size, op);
    }
    mbarrier_complete_async(*this, where, barrier, n * size);
  });
}

void Thread::reduce_async(int where, Reduction r, Element type, uint32_t address, uint64_t value,
                          uint32_t barrier) {
  at = where;
  uint32_t const size = type == Element::kU64 || type == Element::kS64 ? 8 : 4;
  shared_address(*this, where, address, size);
  mbarrier_check(*this, where, barrier);
  post(*this, where, [=] {
    reduce_bytes(*this, where, r, type, arena + address, reinterpret_cast<uint8_t const*>(&value),
                 size);
    mbarrier_complete_async(*this, where, barrier, size);
  });
}

}  // namespace px
