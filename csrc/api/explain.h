// What would serve a call, or why nothing does and which nearby call would be served.
#pragma once

#include <string>
#include <vector>

#include "api/calls.h"

namespace flash_cuda {

struct Explanation {
  bool served = false;
  std::string kernel;  // "sm90_fwd_hdim128"; "none needed" where the result is known without one
  int arch = 0, block_q = 0, block_kv = 0, threads = 0, cluster = 1;
  int num_splits = 1, split_size = 0;
  bool split = false;      // partials and a merge
  bool dealt_out = false;  // the parts follow from the lengths on the device
  bool pack_gqa = false;
  size_t workspace_bytes = 0;  // partials of a split call included
  std::string refusal;         // empty if served
  std::string nearest;         // what to change so that the call is served; may be empty
};

// Where a call is to run: a GPU, here or only described, or the emulator.
struct Target {
  bool emulated = false;
  DeviceInfo device;
  int device_index = -1;
};

// The arguments have passed their checks; `sizes` is what those returned.
Explanation explain_fwd(const FwdArgs& args, const Sizes& sizes, const Target& target);
Explanation explain_bwd(const BwdArgs& args, const Sizes& sizes, const Target& target);

// A few lines for people.
std::string text_of(const Explanation& explanation);

}  // namespace flash_cuda
