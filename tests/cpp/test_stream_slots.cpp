// Slots of streams: kept, given out, taken over from whoever has been idle for longest.
#include "common/stream_slots.h"

#include "expect.h"

using flash_cuda::StreamSlots;

int main() {
  StreamSlots slots(3);
  EXPECT(slots.slot_of(70) == 0);
  EXPECT(slots.slot_of(71) == 1);
  EXPECT(slots.slot_of(70) == 0);
  EXPECT(slots.slot_of(72) == 2);
  EXPECT(slots.slot_of(73) == 1);  // 71 has launched nothing for longest
  EXPECT(slots.slot_of(73) == 1);
  EXPECT(slots.slot_of(70) == 0);
  EXPECT(slots.slot_of(71) == 2);  // 72
  EXPECT(slots.slot_of(72) == 1);  // 73
  for (uint64_t id = 1000; id < 5000; ++id) {
    const int slot = slots.slot_of(id);
    EXPECT(slot >= 0 && slot < 3);
    EXPECT(slots.slot_of(id) == slot);
    if (id > 1001) {
      EXPECT(slots.slot_of(id - 1) != slot);
      EXPECT(slots.slot_of(id) == slot);
    }
  }
}
