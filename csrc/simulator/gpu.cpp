// Every tensor of the CPU lies on the simulated GPU: instead of bindings/gpu.cpp.
#include "../bindings/gpu.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "../cuda/device.h"

namespace flash_attn {
namespace {

// NaN in all new memory, so that a kernel that reads what nobody wrote shows it. Behind each tensor lies
// a page that nobody may touch: who reads or writes there ends the process.
class PoisonedAllocator final : public c10::Allocator {
  static constexpr size_t kAlignBytes = 64;  // torch's own

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
    void* const memory = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    char* const end = static_cast<char*>(memory) + pages;
    mprotect(end, page, PROT_NONE);
    void* const data = std::memset(end - aligned, 0xff, aligned);
    return {data, new Mapping{memory, pages + page}, &Mapping::unmap, cpu};
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
