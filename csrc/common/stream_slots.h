// Slots for the streams of a device, as many as there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace flash_cuda {

// A stream keeps its slot from launch to launch. One that finds none free takes over that of the
// stream which has launched nothing for longest: programs that make ever new streams end old ones.
class StreamSlots {
 public:
  explicit StreamSlots(int count) : count_(count) {}

  // Of the stream with this identifier, which launches now.
  int slot_of(uint64_t stream) {
    ++launches_;
    const auto found = slots_.find(stream);
    if (found != slots_.end()) {
      owners_[static_cast<size_t>(found->second)].last = launches_;
      return found->second;
    }
    const int slot = static_cast<int>(owners_.size()) < count_ ? add() : take_over();
    owners_[static_cast<size_t>(slot)] = {stream, launches_};
    slots_.emplace(stream, slot);
    return slot;
  }

 private:
  struct Owner {
    uint64_t stream, last;  // number of its last launch
  };

  int add() {
    owners_.push_back({});
    return static_cast<int>(owners_.size()) - 1;
  }
  int take_over() {
    size_t oldest = 0;
    for (size_t i = 1; i < owners_.size(); ++i) {
      if (owners_[i].last < owners_[oldest].last) oldest = i;
    }
    slots_.erase(owners_[oldest].stream);
    return static_cast<int>(oldest);
  }

  int count_;
  uint64_t launches_ = 0;
  std::unordered_map<uint64_t, int> slots_;  // by identifier
  std::vector<Owner> owners_;                // by slot
};

}  // namespace flash_cuda
