// Errors that the host's part of a file of kernels throws. What puts words together, <string> and
// <stdexcept>, stands in failure.cpp: it would cost each such file a second of the build, and most
// of them have nothing else to say.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>

namespace flash_attn {

// What a message is put together from: text, or a number.
struct Word {
  Word(const char* text) : text(text) {}
  template <std::integral Number>
  Word(Number number) : number(static_cast<int64_t>(number)) {}

  const char* text = nullptr;
  int64_t number = 0;
};

// Throws std::runtime_error, as something went wrong.
[[noreturn]] void fail(std::initializer_list<Word> message);

// Throws std::invalid_argument, as the caller is wrong.
[[noreturn]] void refuse(std::initializer_list<Word> message);

}  // namespace flash_attn
