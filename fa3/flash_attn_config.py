"""How FlashAttention-3 was built: with everything that these flags speak of."""

from pprint import pprint

_PARTS = (
    *("BACKWARD", "SPLIT", "PAGEDKV", "APPENDKV", "LOCAL", "SOFTCAP", "PACKGQA"),
    *("FP16", "FP8", "VARLEN", "CLUSTER", "SM8x"),
    *("HDIM64", "HDIM96", "HDIM128", "HDIM192", "HDIM256"),
)

CONFIG = {
    "build_flags": {
        **{f"FLASHATTENTION_DISABLE_{part}": False for part in _PARTS},
        "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF64": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF192": False,
    }
}


def show() -> None:
    """Prints CONFIG."""
    pprint(CONFIG)
