// The GPU architectures that the portable kernels (all but those of sm90/) were compiled for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flash_attn {

class Architectures {
 public:
  // As CMake names them, with commas between: "80-real,90-real,80-virtual". Machine code (real)
  // runs on its major version from its minor version on, with a letter (90a) on its own alone; PTX
  // (virtual) on all that is newer. Without either word: both. Empty: a build without CUDA.
  explicit Architectures(std::string_view list);

  bool none() const { return list_.empty(); }
  const std::string& list() const { return list_; }

  // The architecture that the code was compiled for which a GPU runs: machine code if there is any
  // for it, else the newest PTX. 0: none.
  int code_for(int compute_capability) const;

 private:
  struct Entry {
    int number;
    bool real, is_virtual, only_itself;
  };
  std::string list_;
  std::vector<Entry> entries_;
};

// Those of this build.
const Architectures& compiled_architectures();

}  // namespace flash_attn
