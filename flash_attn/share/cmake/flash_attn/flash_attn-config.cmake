# find_package(flash_attn): the target flash_attn::flash_attn, the C++ API over libtorch.
#
# Bring your own torch (find_package(Torch), or any target `torch`) before this, or leave it out: then the torch of
# Python_EXECUTABLE (default python3) is used, by path.
if(NOT TARGET torch AND NOT TARGET torch::torch)
  include(${CMAKE_CURRENT_LIST_DIR}/TorchByPath.cmake)
endif()
if(NOT TARGET flash_attn::flash_attn)
  get_filename_component(flash_attn_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  add_library(flash_attn::flash_attn SHARED IMPORTED)
  set_target_properties(flash_attn::flash_attn PROPERTIES
    IMPORTED_LOCATION ${flash_attn_prefix}/lib/libflash_attn.so
    INTERFACE_INCLUDE_DIRECTORIES ${flash_attn_prefix}/include
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_LINK_LIBRARIES "$<IF:$<TARGET_EXISTS:torch::torch>,torch::torch,torch>")
endif()
set(flash_attn_FOUND TRUE)
