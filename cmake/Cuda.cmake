# Finds nvcc (CUDA_HOME, PATH, then the one that pip installs beside torch) and enables CUDA with it.
#
# Out: FLASH_ATTN_WITH_CUDA; CUDART_LIBRARY. Without nvcc, with a CPU build of torch or with FLASH_ATTN_CUDA=0: a CPU
# build, said plainly.
set(FLASH_ATTN_WITH_CUDA OFF)
if("$ENV{FLASH_ATTN_CUDA}" STREQUAL "0")
  message(STATUS "flash_attn: CPU build (FLASH_ATTN_CUDA=0)")
  return()
endif()
if(TORCH_CUDA_VERSION STREQUAL "")
  message(STATUS "flash_attn: CPU build (torch ${TORCH_VERSION} is built without CUDA)")
  return()
endif()

get_filename_component(site_packages ${TORCH_DIR} DIRECTORY)
string(REGEX MATCH "^[0-9]+" cuda_major ${TORCH_CUDA_VERSION})
set(pip_cuda ${site_packages}/nvidia/cu${cuda_major})
find_program(FLASH_ATTN_NVCC nvcc NO_CMAKE_SYSTEM_PATH NO_CMAKE_PATH
  HINTS $ENV{CUDA_HOME}/bin PATHS ENV PATH /usr/local/cuda/bin ${pip_cuda}/bin)
if(NOT FLASH_ATTN_NVCC)
  message(STATUS "flash_attn: CPU build (no nvcc in CUDA_HOME, PATH or beside torch; "
                 "pip install \"cuda-toolkit[nvcc,cccl,cudart]==${TORCH_CUDA_VERSION}.*\" brings one)")
  return()
endif()

set(FLASH_ATTN_WITH_CUDA ON)
set(CMAKE_CUDA_COMPILER ${FLASH_ATTN_NVCC})
if(FLASH_ATTN_NVCC MATCHES "^${pip_cuda}")
  # pip's toolkit has lib, not lib64: tell the compiler check where its libraries are.
  set(ENV{LIBRARY_PATH} "${pip_cuda}/lib:$ENV{LIBRARY_PATH}")
endif()
if(CMAKE_CROSSCOMPILING)
  # nvcc looks for a toolkit of the other machine. The headers are the same in this machine's, the libraries lie beside torch.
  execute_process(COMMAND ${FLASH_ATTN_NVCC} --dryrun -x cu -c /dev/null OUTPUT_QUIET ERROR_VARIABLE nvcc_says)
  string(REGEX MATCH "TOP=([^\r\n]+)" _ "${nvcc_says}")
  get_filename_component(nvcc_headers "${CMAKE_MATCH_1}/include" ABSOLUTE)
  set(ENV{CUDAFLAGS} "-isystem=${nvcc_headers} -isystem=${nvcc_headers}/cccl -L${pip_cuda}/lib $ENV{CUDAFLAGS}")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # linked below by its full path: pip's toolkit has no unversioned libcudart.so
set(CMAKE_CUDA_ARCHITECTURES OFF)     # each target names its own
enable_language(CUDA)

# The runtime that torch itself loads, so that one copy serves both; else the toolkit's.
file(GLOB cudart_candidates ${pip_cuda}/lib/libcudart.so.*)
foreach(dir ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
  file(GLOB found ${dir}/libcudart.so)
  list(APPEND cudart_candidates ${found})
endforeach()
if(NOT cudart_candidates)
  message(FATAL_ERROR "flash_attn: found ${FLASH_ATTN_NVCC} but no libcudart.so beside torch or in its toolkit")
endif()
list(GET cudart_candidates 0 CUDART_LIBRARY)
message(STATUS "flash_attn: CUDA build with ${FLASH_ATTN_NVCC} (${CMAKE_CUDA_COMPILER_VERSION}), runtime ${CUDART_LIBRARY}")
