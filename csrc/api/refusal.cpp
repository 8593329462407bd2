#include "api/refusal.h"

namespace flash_cuda {

namespace {
thread_local std::string noted_text;
thread_local RefusalKind kind_of_noted = RefusalKind::kValue;
}  // namespace

void note_refusal(const Refusal& refusal) {
  noted_text = refusal.what();
  kind_of_noted = refusal.kind();
}

bool noted_kind(const std::string& text, RefusalKind* kind) {
  if (text != noted_text) return false;
  *kind = kind_of_noted;
  return true;
}

}  // namespace flash_cuda
