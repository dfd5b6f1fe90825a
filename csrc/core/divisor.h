// Division on the device by a number that the host knows.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flash_attn {

// n / divisor for 0 <= n < 2^31 as one product: a division is forty instructions, one behind the
// other, which a launch has to fetch before it can ask for its first key. With p = 31 + ⌈log₂
// divisor⌉ and m = ⌈2ᵖ / divisor⌉, m · divisor exceeds 2ᵖ by less than 2ᵖ / n.
class Divisor {
 public:
  constexpr explicit Divisor(int divisor) : shift_(31) {
    while ((int64_t{1} << (shift_ - 31)) < divisor) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor - 1) / divisor);
  }
  FLASH_ATTN_HOST_DEVICE constexpr int divide(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier_ >>
                            shift_);
  }

 private:
  uint32_t multiplier_ = 0;
  int shift_;
};
static_assert(Divisor(1).divide(2147483647) == 2147483647);
static_assert(Divisor(7).divide(2147483645) == 306783377 && Divisor(7).divide(6) == 0);
static_assert(Divisor(65535).divide(2147450879) == 32767 && Divisor(65535).divide(65534) == 0);
static_assert(Divisor(2147483647).divide(2147483646) == 0);

// A count that the host knows and the device divides by, as `/` and `%` of a number that is not
// negative; else it is an int. Dividing by 0 gives what dividing by 1 does.
class Count {
 public:
  constexpr Count(int value) : value_(value), divisor_(value > 1 ? value : 1) {}
  FLASH_ATTN_HOST_DEVICE constexpr operator int() const { return value_; }

  FLASH_ATTN_HOST_DEVICE friend constexpr int operator/(int n, const Count& count) {
    return count.divisor_.divide(n);
  }
  FLASH_ATTN_HOST_DEVICE friend constexpr int operator%(int n, const Count& count) {
    return n - n / count * count.value_;
  }

 private:
  int value_;
  Divisor divisor_;
};
static_assert(45 / Count(7) == 6 && 45 % Count(7) == 3 && Count(7) * Count(2) == 14);

}  // namespace flash_attn
