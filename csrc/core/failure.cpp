#include "failure.h"

#include <stdexcept>
#include <string>

namespace flash_attn {
namespace {

std::string joined(std::initializer_list<Word> message) {
  std::string words;
  for (const Word& word : message) {
    words += word.text != nullptr ? std::string(word.text) : std::to_string(word.number);
  }
  return words;
}

}  // namespace

void fail(std::initializer_list<Word> message) { throw std::runtime_error(joined(message)); }

void refuse(std::initializer_list<Word> message) { throw std::invalid_argument(joined(message)); }

}  // namespace flash_attn
