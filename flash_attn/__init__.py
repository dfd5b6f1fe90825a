"""Exact attention for PyTorch on every device: forward, backward and decode.

    softmax(scale · Q Kᵀ + bias, masked) V

The functions and their arguments are those of the flash-attn package, version 2.8.3, with
additions; `reference` holds the same mathematics in plain PyTorch, written to be read.
"""

from pkgutil import extend_path

# FlashAttention-4 installs itself as flash_attn.cute, into another directory of the same name.
__path__ = extend_path(__path__, __name__)

# The flash-attn release whose programs this serves, which is what they check, and after the + our
# own release. pyproject.toml reads it from here.
__version__ = "2.8.3+r1"

from flash_attn import _flops, _torch_flash, masks, reference, sdpa
from flash_attn.backends import Support, can_use, use_backend
from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    flash_decode_func,
)
from flash_attn.sdpa import scaled_dot_product_attention
from flash_attn.shared_prefix import SharedPrefix, find_shared_prefix

_flops.register()
_torch_flash.register()

__all__ = [
    "SharedPrefix",
    "Support",
    "can_use",
    "find_shared_prefix",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_decode_func",
    "masks",
    "reference",
    "scaled_dot_product_attention",
    "sdpa",
    "use_backend",
]
