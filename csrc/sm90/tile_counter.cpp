#include "sm90/tile_counter.h"

#include "common/launch_slots.h"

namespace flash_cuda::sm90 {

int tile_counter_index(cudaStream_t stream) {
  static LaunchSlots slots(kStreamCounters, kTileCounters);
  return slots.slot_of(stream);
}

}  // namespace flash_cuda::sm90
