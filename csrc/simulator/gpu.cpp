// Every tensor of the CPU lies on the simulated GPU: instead of bindings/gpu.cpp.
#include "../aten/gpu.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "../cuda/device.h"

namespace flash_attn {
namespace {

// NaN in all new memory, so that a kernel that reads what nobody wrote shows it. Before and behind
// each tensor lies memory that nobody may touch: who reads or writes there ends the process. A
// tensor ends where its last page does; what lies before it on its first page is not watched.
class PoisonedAllocator final : public c10::Allocator {
  static constexpr size_t kAlignBytes = 64;        // torch's own
  static constexpr size_t kGuardBytes = 64 << 20;  // on either side, of addresses alone

  struct Mapping {
    void* memory;
    size_t bytes;

    static void unmap(void* mapping) {
      auto* const self = static_cast<Mapping*>(mapping);
      munmap(self->memory, self->bytes);
      delete self;
    }
  };

 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, cpu};
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t aligned = (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    const size_t pages = (aligned + page - 1) / page * page;
    const size_t mapped = kGuardBytes + pages + kGuardBytes;
    void* const memory =
        mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    char* const begin = static_cast<char*>(memory) + kGuardBytes;
    if (mprotect(begin, pages, PROT_READ | PROT_WRITE) != 0) {
      munmap(memory, mapped);
      throw std::bad_alloc();
    }
    void* const data = std::memset(begin + pages - aligned, 0xff, aligned);
    return {data, new Mapping{memory, mapped}, &Mapping::unmap, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

const bool poisoned = [] {
  static PoisonedAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
  return true;
}();

}  // namespace

const DeviceInfo* gpu_of(const at::Tensor& tensor) {
  return tensor.is_cpu() ? &cuda::device_info(0) : nullptr;
}

Stream stream_of(const at::Tensor&) { return nullptr; }

}  // namespace flash_attn
