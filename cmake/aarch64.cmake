# Compiles for 64-bit Arm Linux on another machine (python3 dev.py wheel --aarch64), with its g++ and this machine's nvcc.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++)
# Neither runs here, nor has nvcc the libraries to link one.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
