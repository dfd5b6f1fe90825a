#include "architectures.h"

#include <algorithm>
#include <charconv>

namespace flash_attn {

Architectures::Architectures(std::string_view list) : list_(list) {
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    const std::string_view name = list.substr(0, comma);
    list.remove_prefix(std::min(comma + 1, list.size()));
    int number = 0;
    const auto rest = std::from_chars(name.data(), name.data() + name.size(), number);
    const std::string_view suffix(rest.ptr, name.data() + name.size() - rest.ptr);
    const bool letter = !suffix.empty() && suffix.front() != '-';
    entries_.push_back({.number = number,
                        .real = !suffix.ends_with("-virtual"),
                        .is_virtual = !suffix.ends_with("-real"),
                        .only_itself = letter});
  }
}

int Architectures::code_for(int compute_capability) const {
  int real = 0, newest_virtual = 0;
  for (const Entry& entry : entries_) {
    if (entry.number > compute_capability) continue;
    if (entry.only_itself && entry.number != compute_capability) continue;
    if (entry.real && entry.number / 10 == compute_capability / 10) {
      real = std::max(real, entry.number);
    }
    if (entry.is_virtual) newest_virtual = std::max(newest_virtual, entry.number);
  }
  return real > 0 ? real : newest_virtual;
}

const Architectures& compiled_architectures() {
  static const Architectures architectures(FLASH_ATTN_COMPILED_ARCHS);
  return architectures;
}

}  // namespace flash_attn
