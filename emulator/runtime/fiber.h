// Stack switch between fibers: callee-saved registers and the stack pointer, nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" void px_switch(void** save, void* load);

namespace px {

constexpr size_t kStackSize = 512 << 10;

uint8_t* new_stack();  // the lowest page is a guard
void free_stack(uint8_t* stack);
void* prepare_stack(uint8_t* stack, void (*entry)());  // to be given to px_switch

}  // namespace px
