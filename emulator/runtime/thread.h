// What translated kernels see: one Thread object for each CUDA thread, and one method for each
// instruction that touches memory, another thread or an asynchronous unit.
//
// `at` is the number of the instruction in its function; the site table of the function turns it
// into a PTX line and a C++ source line. Methods that can block switch to the scheduler and return
// when the thread is picked again.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "numbers.h"

namespace px {

struct Thread;
struct Cta;
struct Warp;
struct AsyncState;
struct HbThread;

using KernelFn = void (*)(Thread&);

// Kernels are part of the library, or (PX_SEPARATE) objects of their own, compiled when they are
// first launched and linked against what the library exports.
#define PX_EXPORTED __attribute__((visibility("default")))
#ifdef PX_SEPARATE
#define PX_CODE(fn) nullptr
#define PX_SEPARATE_KERNEL(fn) \
  extern "C" PX_EXPORTED px::KernelFn const flash_cuda_emulated_kernel = px::fn;
#else
#define PX_CODE(fn) fn
#define PX_SEPARATE_KERNEL(fn)
#endif

// A translated function. `sites_file` says where its instructions come from; it is read when
// something is to be reported.
struct FunctionInfo {
  char const* name;
  char const* ptx_file;
  char const* sites_file;
};
struct ParamInfo {
  uint32_t offset, size;
};
struct KernelInfo {
  FunctionInfo const* function;
  KernelFn fn;                   // null: not compiled yet
  char const* code;              // name of its C++ file
  uint32_t dynamic_smem_offset;  // in the shared window; the first KiB belongs to the system
  uint32_t param_bytes;
  uint32_t max_threads;  // .maxntid, 0: none
  uint32_t cluster[3];   // .reqnctapercluster, 0: none
  uint32_t num_params;
  ParamInfo const* params;
};
struct VariableInfo {
  char const* name;
  void* address;
  uint64_t size;
};
// One translated PTX module registers itself when the library is loaded.
struct ModuleInfo {
  KernelInfo const* kernels;
  uint32_t num_kernels;
  VariableInfo const* variables;
  uint32_t num_variables;
};
struct RegisterModule {
  explicit RegisterModule(ModuleInfo const& module);
};

// Memory order and scope of an access; kWeak is a plain access.
enum Order : int { kWeak = 0, kRelaxed = 1, kAcquire = 2, kRelease = 4, kAcqRel = 6 };
enum Scope : int { kScopeCta, kScopeCluster, kScopeGpu };

enum class Reduction { kNone, kAdd, kMin, kMax, kAnd, kOr, kXor };
enum class Element { kB8, kF16, kBF16, kF32, kF64, kS32, kU32, kU64, kS64, kE4M3, kE5M2, kTF32 };

constexpr int kCtaShift = 24;  // shared::cluster window: rank of the thread block in bits 24 and up
constexpr uint32_t kCtaStride = 1u << kCtaShift;
constexpr uint32_t kMaxClusterSize = 16;

struct PX_EXPORTED Thread {
  // ---- identity
  uint32_t tid[3];
  uint32_t lane, warp_id, linear;
  Cta* cta;
  Warp* warp;
  FunctionInfo const* function;  // being executed, for reports
  uint8_t const* params;
  uint8_t* arena;     // host address of shared window address 0 of the cluster
  uint32_t smem_tag;  // rank << kCtaShift
  int at;             // the last instruction that called the runtime
  uint32_t fuel;      // backward branches left before the scheduler looks at this thread
  // Copies for special registers.
  uint32_t ntid[3], ctaid[3], nctaid[3], clusterid[3], nclusterid[3];
  uint32_t cluster_ctaid[3], cluster_nctaid[3], rank, cluster_size, sm_id, num_sms;
  uint32_t dynamic_smem, total_smem, num_warps;
  AsyncState* async;  // groups and completions of this thread, see machine.h
  HbThread* hb;       // vector clocks, null unless the race check is on

  // ---- control
  [[noreturn]] void fail(int at, char const* what);
  [[noreturn]] void exit_thread();
  void tick(int at) {
    if (--fuel == 0) out_of_fuel(at);
  }
  void out_of_fuel(int at);
  void yield(int at);
  uint32_t clock(int at);
  void setmaxnreg(int at, bool increase, uint32_t count);
  void griddep_wait(int at);
  void griddep_launch_dependents(int at);

  // ---- memory: each returns the host address of `n` bytes after checking the access
  uint8_t* load_shared(int at, uint32_t address, uint32_t n);
  uint8_t* store_shared(int at, uint32_t address, uint32_t n);
  uint8_t* load_global(int at, uint64_t address, uint32_t n);  // generic addresses too
  uint8_t* store_global(int at, uint64_t address, uint32_t n);
  uint8_t* load_strong(int at, bool shared, uint64_t address, uint32_t n, int order, int scope);
  uint8_t* store_strong(int at, bool shared, uint64_t address, uint32_t n, int order, int scope);
  uint8_t* atomic(int at, bool shared, uint64_t address, uint32_t n, int order, int scope);
  void fence(int at, int scope);
  void fence_proxy_async(int at);
  void fence_mbarrier_init(int at);
  uint64_t to_shared(uint64_t generic) { return generic - uint64_t(arena); }
  uint64_t from_shared(uint64_t address) { return address + uint64_t(arena); }
  bool is_shared(uint64_t g) {
    return g - uint64_t(arena) < uint64_t(kMaxClusterSize) * kCtaStride;
  }
  bool is_local(uint64_t g);
  bool is_global(uint64_t g) { return !is_shared(g) && !is_local(g); }
  bool is_const(uint64_t) { return false; }
  void store_async(int at, uint32_t address, uint64_t const* values, uint32_t n, uint32_t size,
                   uint32_t barrier);
  void reduce_async(int at, Reduction op, Element type, uint32_t address, uint64_t value,
                    uint32_t barrier);

  // ---- warp collectives
  uint32_t shfl(int at, int mode, uint32_t v, uint32_t b, uint32_t c, uint32_t mask, bool& p);
  uint32_t vote_ballot(int at, bool v, uint32_t mask);
  bool vote_any(int at, bool v, uint32_t mask) { return vote_ballot(at, v, mask) != 0; }
  bool vote_all(int at, bool v, uint32_t mask) { return vote_ballot(at, !v, mask) == 0; }
  bool vote_uni(int at, bool v, uint32_t mask);
  uint32_t match_any(int at, uint64_t v, uint32_t mask);
  uint32_t match_all(int at, uint64_t v, uint32_t mask, bool& p);
  uint64_t redux(int at, int op, uint64_t v, bool is_signed, uint32_t mask);
  // Lanes are scheduled independently, so the weakest legal answer.
  uint32_t activemask(int) { return 1u << lane; }
  bool elect(int at, uint32_t mask, uint32_t& leader);
  void bar_warp(int at, uint32_t mask);

  // ---- barriers of the thread block and the cluster
  void bar_sync(int at, uint32_t id, uint32_t n);
  void bar_arrive(int at, uint32_t id, uint32_t n);
  uint32_t bar_red_popc(int at, uint32_t id, uint32_t n, bool v);
  bool bar_red_and(int at, uint32_t id, uint32_t n, bool v);
  bool bar_red_or(int at, uint32_t id, uint32_t n, bool v);
  void cluster_arrive(int at, bool release);
  void cluster_wait(int at, bool acquire);
  uint32_t mapa(uint32_t address, uint32_t r) {
    return (address & (kCtaStride - 1)) | r << kCtaShift;
  }
  uint64_t mapa64(uint64_t g, uint32_t r) { return from_shared(mapa(uint32_t(to_shared(g)), r)); }

  // ---- mbarriers
  void mbarrier_init(int at, uint32_t address, uint32_t count);
  void mbarrier_inval(int at, uint32_t address);
  uint64_t mbarrier_arrive(int at, uint32_t address, uint32_t count, uint32_t tx, bool drop,
                           int order);
  void mbarrier_expect_tx(int at, uint32_t address, uint32_t tx);
  void mbarrier_complete_tx(int at, uint32_t address, uint32_t tx);
  bool mbarrier_wait(int at, uint32_t address, uint32_t parity, bool can_block, int order);
  uint32_t mbarrier_pending(uint64_t state);
  static uint32_t mbarrier_parity(uint64_t state) { return uint32_t(state >> 63); }

  // ---- asynchronous copies
  void cp_async(int at, uint32_t dst, uint64_t src, uint32_t n, uint32_t src_n);
  void cp_async_commit(int at);
  void cp_async_wait(int at, uint32_t n);
  void cp_async_mbarrier(int at, uint32_t address, bool noinc);
  void bulk_load(int at, uint32_t dst, uint64_t src, uint32_t n, uint32_t barrier, bool multicast,
                 uint32_t mask);
  void bulk_store(int at, uint64_t dst, uint32_t src, uint32_t n, Reduction r, Element e);
  void bulk_peer(int at, uint32_t dst, uint32_t src, uint32_t n, uint32_t barrier, Reduction r,
                 Element e);
  void bulk_commit(int at);
  void bulk_wait(int at, uint32_t n, bool read_only);
  void tma_load(int at, int rank, uint32_t dst, uint64_t map, int32_t const* coordinates,
                uint32_t barrier, bool multicast, uint32_t mask, int cta_group);
  void tma_store(int at, int rank, uint32_t src, uint64_t map, int32_t const* coordinates,
                 Reduction r);

  // ---- matrices
  void ldmatrix(int at, int count, bool transpose, void* const* d, uint32_t address);
  void stmatrix(int at, int count, bool transpose, uint32_t address, void* const* s);
  void movmatrix(int at, void* const* d, uint32_t v);
  // A has 2 or 4 registers a lane, B half as many, D and C 4 (f32) or 2 (f16).
  void mma(int at, int a_regs, Element a, Element b, bool f16_accumulator, void* const* d,
           uint32_t const* av, uint32_t const* bv, uint32_t const* cv);
  void wgmma_fence(int at);
  void wgmma_commit(int at);
  void wgmma_wait(int at, uint32_t n);
  void wgmma(int at, int n, Element a_type, Element b_type, void* const* d, void* const* a,
             uint64_t a_desc, uint64_t b_desc, bool scale_d, int scale_a, int scale_b,
             bool a_mn_major, bool b_mn_major, bool f16_accumulator);

  // ---- tcgen05
  void tmem_alloc(int at, int group, uint32_t dst, uint32_t columns);
  void tmem_dealloc(int at, int group, uint32_t address, uint32_t columns);
  void tmem_relinquish(int at, int group);
  void tmem_load(int at, int shape, int num, int regs, void* const* d, uint32_t address);
  void tmem_store(int at, int shape, int num, int regs, uint32_t const* v, uint32_t address);
  void tmem_wait(int at, bool store);
  void tcgen05_fence(int at, bool after);
  void tcgen05_commit(int at, int group, uint32_t barrier, bool multicast, uint32_t mask);
  void tcgen05_mma(int at, int group, bool kind_f8, bool a_in_tmem, uint32_t d, uint64_t a,
                   uint64_t b_desc, uint32_t i_desc, uint32_t const* mask, int mask_words,
                   bool accumulate);
  void tcgen05_cp(int at, int group, int shape, uint32_t dst, uint64_t desc);

  // ---- cluster launch control
  void clc_try_cancel(int at, uint32_t dst, uint32_t barrier, bool multicast);
};

PX_EXPORTED void device_vprintf(Thread&, int at, uint8_t* ret, uint8_t* format, uint8_t* args);
PX_EXPORTED void device_assertfail(Thread&, int at, uint8_t* message, uint8_t* file, uint8_t* line,
                                   uint8_t* function, uint8_t* char_size);

}  // namespace px
