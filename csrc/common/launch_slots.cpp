#include "common/launch_slots.h"

#include "common/launch.h"

namespace flash_cuda {

int LaunchSlots::next_shared() {
  return stream_slots_ + static_cast<int>(next_++ % static_cast<unsigned>(all_ - stream_slots_));
}

int LaunchSlots::slot_of(cudaStream_t stream) {
  if (is_capturing(stream)) return next_shared();
  unsigned long long id = 0;  // never reused in a process; handles are
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = known_.find(id);
  if (found != known_.end()) return found->second;
  const int slot = static_cast<int>(known_.size());
  if (slot == stream_slots_) return next_shared();
  known_.emplace(id, slot);
  return slot;
}

}  // namespace flash_cuda
