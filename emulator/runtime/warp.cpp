// Warp collectives: lanes meet by instruction kind and member mask; the last one does the work.
#include "machine.h"

namespace px {

void complete_collectives(Warp& w) {
  for (uint32_t left = w.live; left; left &= left - 1) {
    uint32_t const i = uint32_t(__builtin_ctz(left));
    Collective& c = w.pending[i];
    if ((c.mask & w.alive & ~c.arrived) != 0) continue;
    w.live &= ~(1u << i);
    c.fn(c, c.context);
    for (uint32_t bits = c.arrived; bits; bits &= bits - 1) M.wake(w.lanes[__builtin_ctz(bits)]);
  }
}

void collective(Thread& t, int at, uint64_t key, uint32_t mask, void* arg, char const* why,
                void (*fn)(Collective&, void const*), void const* context) {
  Warp& w = *t.warp;
  uint32_t const bit = 1u << t.lane;
  t.at = at;
  if (!(mask & bit)) t.fail(at, "lane not in its own member mask");
  Collective* c = nullptr;
  for (uint32_t left = w.live; left && !c; left &= left - 1) {
    Collective& p = w.pending[__builtin_ctz(left)];
    if (p.key == key && p.mask == mask && !(p.arrived & bit)) c = &p;
  }
  if (!c) {  // a lane waits in one place only, so 32 are enough
    uint32_t const i = uint32_t(__builtin_ctz(~w.live));
    w.live |= 1u << i;
    c = &w.pending[i];
    c->key = key;
    c->mask = mask;
    c->arrived = 0;
    c->fn = fn;
  }
  // The context lives on the stack of a lane that waits until the work is done: the last comer's.
  c->context = context;
  c->arg[t.lane] = arg;
  c->arrived |= bit;
  if ((mask & w.alive & ~c->arrived) == 0)
    complete_collectives(w);  // wakes the others; this lane is not blocked and goes on
  else
    block(t, at, why);
}

namespace {
template <class Fn>
void each_lane(uint32_t mask, Fn fn) {
  for (; mask; mask &= mask - 1) fn(uint32_t(__builtin_ctz(mask)));
}
template <class Arg>
Arg& arg_of(Collective& c, uint32_t lane) {
  return *static_cast<Arg*>(c.arg[lane]);
}
struct ShflArg {
  uint32_t v, b, c, result;
  bool valid;
};
struct VoteArg {
  bool v;
  uint32_t result;
};
struct ValueArg {
  uint64_t v, result;
};
}  // namespace

// PTX ISA, shfl.sync: modes idx, up, down, bfly; `c` packs the segment mask and the clamp value.
uint32_t Thread::shfl(int where, int mode, uint32_t v, uint32_t b, uint32_t c, uint32_t mask,
                      bool& p) {
  ShflArg a{v, b, c, 0, false};
  collective(*this, where, kShfl | uint64_t(mode) << 8, mask, &a, "shfl.sync", [=](Collective& k) {
    each_lane(k.arrived, [&](uint32_t l) {
      ShflArg& q = arg_of<ShflArg>(k, l);
      uint32_t const segment = q.c >> 8 & 31, clamp = q.c & 31, offset = q.b & 31;
      int const limit = int((l & segment) | (clamp & ~segment)), first = int(l & segment);
      int j = 0;
      switch (mode) {
        case 0:
          j = int(uint32_t(first) | (offset & ~segment));
          break;
        case 1:
          j = int(l) - int(offset);
          break;
        case 2:
          j = int(l + offset);
          break;
        default:
          j = int(l ^ offset);
      }
      q.valid = mode == 1 ? j >= limit : j <= limit;
      if (!q.valid) j = int(l);
      if (!(k.arrived >> j & 1)) fail(where, "shfl.sync reads a lane that does not take part");
      q.result = arg_of<ShflArg>(k, uint32_t(j)).v;
    });
  });
  p = a.valid;
  return a.result;
}

uint32_t Thread::vote_ballot(int where, bool v, uint32_t mask) {
  VoteArg a{v, 0};
  collective(*this, where, kVote, mask, &a, "vote.sync", [](Collective& k) {
    uint32_t r = 0;
    each_lane(k.arrived, [&](uint32_t l) { r |= uint32_t(arg_of<VoteArg>(k, l).v) << l; });
    each_lane(k.arrived, [&](uint32_t l) { arg_of<VoteArg>(k, l).result = r; });
  });
  return a.result;
}

bool Thread::vote_uni(int where, bool v, uint32_t mask) {
  uint32_t const r = vote_ballot(where, v, mask);
  return r == 0 || r == (mask & warp->alive);
}

bool Thread::elect(int where, uint32_t mask, uint32_t& leader) {
  uint32_t r = 0;
  collective(*this, where, kElect, mask, &r, "elect.sync", [](Collective& k) {
    each_lane(k.arrived,
              [&](uint32_t l) { arg_of<uint32_t>(k, l) = uint32_t(__builtin_ctz(k.arrived)); });
  });
  leader = r;
  return r == lane;
}

uint32_t Thread::match_any(int where, uint64_t v, uint32_t mask) {
  ValueArg a{v, 0};
  collective(*this, where, kMatch, mask, &a, "match.sync", [](Collective& k) {
    each_lane(k.arrived, [&](uint32_t l) {
      each_lane(k.arrived, [&](uint32_t j) {
        if (arg_of<ValueArg>(k, l).v == arg_of<ValueArg>(k, j).v)
          arg_of<ValueArg>(k, l).result |= 1u << j;
      });
    });
  });
  return uint32_t(a.result);
}

uint32_t Thread::match_all(int where, uint64_t v, uint32_t mask, bool& p) {
  uint32_t const r = match_any(where, v, mask);
  p = vote_all(where, r == (mask & warp->alive), mask);
  return p ? r : 0;
}

// Operators: 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor, on 32-bit values.
uint64_t Thread::redux(int where, int op, uint64_t v, bool is_signed, uint32_t mask) {
  ValueArg a{v, 0};
  collective(*this, where, kRedux | uint64_t(op) << 8, mask, &a, "redux.sync", [=](Collective& k) {
    bool first = true;
    uint32_t r = 0;
    each_lane(k.arrived, [&](uint32_t l) {
      uint32_t const x = uint32_t(arg_of<ValueArg>(k, l).v);
      bool const less = is_signed ? int32_t(x) < int32_t(r) : x < r;
      if (first)
        r = x;
      else if (op == 0)
        r += x;
      else if (op == 1)
        r = less ? x : r;
      else if (op == 2)
        r = less ? r : x;
      else if (op == 3)
        r &= x;
      else if (op == 4)
        r |= x;
      else
        r ^= x;
      first = false;
    });
    each_lane(k.arrived, [&](uint32_t l) { arg_of<ValueArg>(k, l).result = r; });
  });
  return a.result;
}

void Thread::bar_warp(int where, uint32_t mask) {
  if (M.planted(Plant::kSyncwarp, where)) return;
  collective(*this, where, kBarWarp, mask, nullptr, "bar.warp.sync", [this](Collective& k) {
    if (M.race) M.race->warp_barrier(warp->lanes, k.arrived);
  });
}

// The thread block starts with an even share of 64K registers a thread, a multiple of 8; an
// increase waits until others have given back enough of these. So 384 threads have 3 x 168 to deal
// out.
void Thread::setmaxnreg(int where, bool increase, uint32_t count) {
  if (count < 24 || count > 256 || count % 8) fail(where, "setmaxnreg value");
  collective(*this, where, kAligned | uint64_t(where), kAllLanes, nullptr, "setmaxnreg",
             [&](Collective&) {
               if (increase ? count < warp->registers : count > warp->registers)
                 fail(where, increase ? "setmaxnreg.inc below the current count"
                                      : "setmaxnreg.dec above the current count");
               if (increase) return;
               cta->free_registers += 32 * int64_t(warp->registers - count);
               warp->registers = count;
               for (Thread* t : cta->register_waiters) M.wake(t);
               cta->register_waiters.clear();
             });
  if (!increase) return;
  if (lane == 0) {  // one lane does the waiting
    int64_t const more = 32 * int64_t(count - warp->registers);
    while (cta->free_registers < more) {
      cta->register_waiters.push_back(this);
      block(*this, where, "setmaxnreg.inc (register pool empty)");
    }
    cta->free_registers -= more;
    warp->registers = count;
  }
  collective(*this, where, kBarWarp, kAllLanes, nullptr, "setmaxnreg.inc", [](Collective&) {});
}

}  // namespace px
