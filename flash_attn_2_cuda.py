"""Upstream's extension module of this name, for packages that call its five functions by position.

Same positional order (csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3), our ops, any device. Use
`flash_attn` for anything new.
"""

from flash_attn._positional import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
