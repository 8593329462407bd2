// How a call is refused: an exception with a text for the caller and the kind of Python error.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace flash_cuda {

enum class RefusalKind : int { kValue, kType, kUnsupported };

// A std::invalid_argument, because that reaches Python from an op as a ValueError with the bare
// text. Python functions ask `_C.refusal_kind` and raise TypeError and NotImplementedError too.
class Refusal : public std::invalid_argument {
 public:
  Refusal(RefusalKind kind, const std::string& text) : std::invalid_argument(text), kind_(kind) {}
  RefusalKind kind() const { return kind_; }

 private:
  RefusalKind kind_;
};

// An op runs far below the Python function that its text goes to, with torch in between. The op
// notes the refusal of its thread; the Python function asks for the kind of the text that it got.
void note_refusal(const Refusal& refusal);
// False where the last refusal of this thread had another text.
bool noted_kind(const std::string& text, RefusalKind* kind);

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  text << std::boolalpha;
  (text << ... << parts);
  return text.str();
}

template <class... Parts>
[[noreturn]] void refuse_value(const Parts&... parts) {
  throw Refusal(RefusalKind::kValue, join(parts...));
}
template <class... Parts>
[[noreturn]] void refuse_type(const Parts&... parts) {
  throw Refusal(RefusalKind::kType, join(parts...));
}
template <class... Parts>
[[noreturn]] void refuse_unsupported(const Parts&... parts) {
  throw Refusal(RefusalKind::kUnsupported, join(parts...));
}

}  // namespace flash_cuda
