# The library once more for a simulated GPU (csrc/simulator): the kernels' own source, compiled for this machine's CPU.
# Not part of a build: cmake --build build --target flash_attn_simulated_80 (or 90), what python3 dev.py test --simulator
# does. The library has the name of the real one, in a folder of its own: whoever finds it first runs on it.
set(simulator ${CMAKE_SOURCE_DIR}/csrc/simulator)
set(staged ${CMAKE_BINARY_DIR}/simulator/csrc)

# The sources as they are, with the simulator's own files where a kernel meets the GPU. Copies, which a change of theirs
# makes again: a compiler's cache follows links, and then includes what lies beside the original.
file(GLOB_RECURSE sources RELATIVE ${CMAKE_SOURCE_DIR}/csrc CONFIGURE_DEPENDS
  csrc/*.h csrc/*.cuh csrc/*.cu csrc/simulator/*.cpp)
foreach(source ${sources})
  if(source MATCHES "^simulator/overlay/(.+)$")
    set(place ${CMAKE_MATCH_1})
  elseif(EXISTS ${simulator}/overlay/${source} OR source MATCHES "/ptx/")
    continue()
  else()
    set(place ${source})
  endif()
  configure_file(${CMAKE_SOURCE_DIR}/csrc/${source} ${staged}/${place} COPYONLY)
endforeach()

set(machine ${staged}/simulator/block.cpp ${staged}/simulator/exchange.cpp ${staged}/simulator/grid.cpp)

# One kernel object library for an architecture, of the sources given (csrc/…).
function(flash_attn_add_simulated_kernels target arch)
  set(kernels ${ARGN})
  list(TRANSFORM kernels REPLACE "^csrc/" "${staged}/")
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${kernels})
  set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX)
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_definitions(${target} PRIVATE FLASH_ATTN_SIMULATE=${arch})
  # thread_local arrays without a function that asks whether they were initialized: they need not be.
  target_compile_options(${target} PRIVATE -include ${staged}/simulator/device.h -fno-extern-tls-init -O1
    -Wno-unknown-pragmas -Wno-attributes)
endfunction()

flash_attn_add_simulated_kernels(flash_attn_simulated_kernels_sm90 90 ${hopper_kernels})
foreach(arch 80 90)
  flash_attn_add_simulated_kernels(flash_attn_simulated_kernels_${arch} ${arch} ${portable_kernels} ${one_ptx_kernels})
  add_library(flash_attn_simulated_${arch} SHARED EXCLUDE_FROM_ALL
    $<TARGET_OBJECTS:flash_attn_choice>
    $<TARGET_OBJECTS:flash_attn_torch>
    $<TARGET_OBJECTS:flash_attn_simulated_kernels_${arch}>
    $<TARGET_OBJECTS:flash_attn_simulated_kernels_sm90>
    ${machine}
    ${staged}/simulator/driver.cpp
    ${staged}/simulator/gpu.cpp)
  set_target_properties(flash_attn_simulated_${arch} PROPERTIES
    OUTPUT_NAME flash_attn
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/simulator/${arch})
  target_include_directories(flash_attn_simulated_${arch} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  flash_attn_link_torch(flash_attn_simulated_${arch})
endforeach()

# Kernels with faults, for tests/test_simulator.py.
flash_attn_add_simulated_kernels(flash_attn_simulator_test_kernels 90 csrc/tests/simulator.cu)
add_library(flash_attn_simulator_tests SHARED EXCLUDE_FROM_ALL
  $<TARGET_OBJECTS:flash_attn_simulator_test_kernels>
  csrc/core/failure.cpp
  ${machine})
set_target_properties(flash_attn_simulator_tests PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/simulator)
target_include_directories(flash_attn_simulator_tests SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
flash_attn_warnings(flash_attn_simulator_tests)
