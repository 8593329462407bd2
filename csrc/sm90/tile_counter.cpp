#include "sm90/tile_counter.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "common/launch.h"

namespace flash_cuda::sm90 {
namespace {

int next_shared_counter() {
  static std::atomic<unsigned> next{0};
  return kStreamCounters + static_cast<int>(next++ % (kTileCounters - kStreamCounters));
}

// Identifiers of streams are never reused in a process, handles are.
int counter_of_stream(unsigned long long id) {
  static std::mutex mutex;
  static std::unordered_map<unsigned long long, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(id);
  if (found != known.end()) return found->second;
  if (known.size() == kStreamCounters) return next_shared_counter();
  const int counter = static_cast<int>(known.size());
  known.emplace(id, counter);
  return counter;
}

}  // namespace

int tile_counter_index(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status != cudaStreamCaptureStatusNone) return next_shared_counter();
  unsigned long long id = 0;
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  return counter_of_stream(id);
}

}  // namespace flash_cuda::sm90
