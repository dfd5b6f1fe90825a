"""Written by the build: what this copy of flash_attn was built against."""

TORCH_VERSION = "2.11.0+cu130"
CUDA = False
CUDA_ARCHS = []
