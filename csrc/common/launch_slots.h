// Which piece of persistent device memory a launch may use for counters that are zero between
// launches.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "common/stream_slots.h"

namespace flash_cuda {

// Launches on one stream run one after the other and share a slot, of `stream_slots` on each
// device. Beyond so many streams one takes over the slot of another that has been idle for longest.
// A launch that is being captured gets the next of the other slots, since a graph may run beside
// any stream. So two launches meet in a slot only if they run at the same time and are captured
// all_slots - stream_slots launches apart, or are one launch of a graph that was instantiated
// twice, or stream_slots other streams have launched between them.
class LaunchSlots {
 public:
  LaunchSlots(int stream_slots, int all_slots) : stream_slots_(stream_slots), all_(all_slots) {}
  int slot_of(cudaStream_t stream);

 private:
  const int stream_slots_, all_;
  std::atomic<unsigned> captured_{0};
  std::mutex mutex_;
  std::unordered_map<int, StreamSlots> devices_;
};

}  // namespace flash_cuda
