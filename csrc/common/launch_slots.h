// Which piece of persistent device memory a launch may use for counters that are zero between
// launches.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace flash_cuda {

// Launches on one stream run one after the other and share a slot. A launch that is being captured
// gets the next of the others, since a graph may run beside any stream.
class LaunchSlots {
 public:
  LaunchSlots(int stream_slots, int all_slots) : stream_slots_(stream_slots), all_(all_slots) {}
  int slot_of(cudaStream_t stream);

 private:
  int next_shared();

  const int stream_slots_, all_;
  std::atomic<unsigned> next_{0};
  std::mutex mutex_;
  std::unordered_map<unsigned long long, int> known_;  // by identifier of the stream
};

}  // namespace flash_cuda
