#include "fiber.h"

#include <sys/mman.h>

#include <cstdio>
#include <stdexcept>

#if defined(__x86_64__)
asm(R"(
.text
.globl px_switch
.hidden px_switch
.type px_switch, @function
px_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size px_switch, .-px_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl px_switch
.hidden px_switch
.type px_switch, @function
px_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size px_switch, .-px_switch
)");
#else
#error "the emulator has a stack switch for x86-64 and aarch64 only"
#endif

namespace px {

uint8_t* new_stack() {
  void* p = mmap(nullptr, kStackSize, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED || mprotect(p, 4096, PROT_NONE))
    throw std::runtime_error("emulator: no memory map for a stack (vm.max_map_count)");
  return static_cast<uint8_t*>(p);
}

void free_stack(uint8_t* stack) { munmap(stack, kStackSize); }

void* prepare_stack(uint8_t* stack, void (*entry)()) {
  uint64_t* sp = reinterpret_cast<uint64_t*>(stack + kStackSize) - 2;
#if defined(__x86_64__)
  *--sp = 0;  // rsp % 16 == 8 at function entry
  *--sp = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--sp = 0;
#else
  sp -= 20;
  for (int i = 0; i < 20; ++i) sp[i] = 0;
  sp[11] = reinterpret_cast<uint64_t>(entry);  // x30
#endif
  return sp;
}

}  // namespace px
