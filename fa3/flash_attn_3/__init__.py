"""FlashAttention-3's names, served by the flash_attn package."""

from importlib.metadata import version

__version__ = version("flash-attn-3")
