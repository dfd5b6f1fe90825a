"""flash_attn_config under the name that it has in this package."""

from flash_attn_config import CONFIG, show

__all__ = ["CONFIG", "show"]
