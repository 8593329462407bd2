#include "common/launch_slots.h"

#include "common/launch.h"

namespace flash_cuda {

int LaunchSlots::slot_of(cudaStream_t stream) {
  if (is_capturing(stream)) {
    return stream_slots_ +
           static_cast<int>(captured_++ % static_cast<unsigned>(all_ - stream_slots_));
  }
  unsigned long long id = 0;  // never reused in a process; handles are
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex_);
  return devices_.try_emplace(device, stream_slots_).first->second.slot_of(id);
}

}  // namespace flash_cuda
