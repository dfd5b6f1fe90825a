# torch::torch from the Python package, by path. find_package(Torch) fails for a CUDA build of torch on a machine without
# the CUDA Toolkit, and overrides CUDA architectures where it works. Used by the build and by the installed package.
#
# In: Python_EXECUTABLE (default python3). FLASH_ATTN_TORCH_DIR: the package torch of another kind of machine, when compiling
# for that; it cannot be run. Out: target torch::torch; TORCH_DIR, TORCH_VERSION, TORCH_CUDA_VERSION ("" for a CPU build of
# torch).
if(NOT Python_EXECUTABLE)
  find_program(Python_EXECUTABLE NAMES python3 python REQUIRED)
endif()
if(FLASH_ATTN_TORCH_DIR)
  set(TORCH_DIR ${FLASH_ATTN_TORCH_DIR})
  file(STRINGS ${TORCH_DIR}/version.py torch_facts)
  string(REGEX MATCH "__version__ = '([^']+)'" _ "${torch_facts}")
  set(TORCH_VERSION ${CMAKE_MATCH_1})
  string(REGEX MATCH "cuda: [^=]+ = '?([0-9.]*)" _ "${torch_facts}")
  set(TORCH_CUDA_VERSION "${CMAKE_MATCH_1}")
  set(torch_cxx11_abi 1)  # of every torch from 2.7 on
  set(torch_libstdcxx "")
else()
  # The C++ runtime is linked by path, too: the one that libtorch has loaded. A compiler without a libstdc++.so beside it links
  # libstdc++.a instead, and two runtimes in one process crash where a stream of the one prints with a locale of the other.
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import torch; print(torch.__path__[0], torch.__version__, torch.version.cuda or '', int(torch.compiled_with_cxx11_abi()), \
next((line.split()[-1] for line in open('/proc/self/maps') if '/libstdc++.so' in line), ''), sep=';')"
    OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing ERROR_QUIET)
  if(torch_missing)
    message(FATAL_ERROR "flash_attn: ${Python_EXECUTABLE} has no torch. Install torch first (pip install torch), then build against it.")
  endif()
  list(GET torch_facts 0 TORCH_DIR)
  list(GET torch_facts 1 TORCH_VERSION)
  list(GET torch_facts 2 TORCH_CUDA_VERSION)
  list(GET torch_facts 3 torch_cxx11_abi)
  list(GET torch_facts 4 torch_libstdcxx)
endif()

if(NOT TARGET torch::torch)
  add_library(torch::torch INTERFACE IMPORTED)
  set(torch_libs "")
  foreach(name torch torch_cpu torch_cuda c10 c10_cuda)
    if(EXISTS ${TORCH_DIR}/lib/lib${name}.so)
      list(APPEND torch_libs ${TORCH_DIR}/lib/lib${name}.so)
    endif()
  endforeach()
  if(EXISTS "${torch_libstdcxx}")
    list(APPEND torch_libs ${torch_libstdcxx})
  endif()
  set_target_properties(torch::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${TORCH_DIR}/include;${TORCH_DIR}/include/torch/csrc/api/include"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${TORCH_DIR}/include;${TORCH_DIR}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi}"
    INTERFACE_LINK_LIBRARIES "${torch_libs}")
endif()
