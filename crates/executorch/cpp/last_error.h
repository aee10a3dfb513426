#pragma once
#include <string>

namespace executorch {
namespace cache {

// Why the last call on this thread failed: an Error of the runtime carries no text.
inline std::string& last_error() {
  static thread_local std::string text;
  return text;
}

} // namespace cache
} // namespace executorch
