"""The public functions as type checkers see them."""

from flash_attn import _positional
from flash_attn._functions import _Applied as _Applied
from flash_attn._functions import _get_block_size_n as _get_block_size_n
from flash_attn._functions import maybe_contiguous as maybe_contiguous
from flash_attn._functions import round_multiple as round_multiple
from flash_attn._upstream import _flash_attn_backward as _flash_attn_backward
from flash_attn._upstream import _flash_attn_forward as _flash_attn_forward
from flash_attn._upstream import _flash_attn_varlen_backward as _flash_attn_varlen_backward
from flash_attn._upstream import _flash_attn_varlen_forward as _flash_attn_varlen_forward
from flash_attn._upstream import _wrapped_flash_attn_backward as _wrapped_flash_attn_backward
from flash_attn._upstream import _wrapped_flash_attn_forward as _wrapped_flash_attn_forward
from flash_attn._upstream import (
    _wrapped_flash_attn_varlen_backward as _wrapped_flash_attn_varlen_backward,
)
from flash_attn._upstream import (
    _wrapped_flash_attn_varlen_forward as _wrapped_flash_attn_varlen_forward,
)
from flash_attn.attention import flash_attn_func as flash_attn_func
from flash_attn.attention import flash_attn_varlen_func as flash_attn_varlen_func
from flash_attn.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
from flash_attn.kvcache import flash_decode_func as flash_decode_func
from flash_attn.packed import flash_attn_kvpacked_func as flash_attn_kvpacked_func
from flash_attn.packed import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from flash_attn.packed import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from flash_attn.packed import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_decode_func",
]

flash_attn_gpu = _positional
USE_TRITON_ROCM: bool

class FlashAttnFunc(_Applied): ...
class FlashAttnKVPackedFunc(_Applied): ...
class FlashAttnQKVPackedFunc(_Applied): ...
class FlashAttnVarlenFunc(_Applied): ...
class FlashAttnVarlenKVPackedFunc(_Applied): ...
class FlashAttnVarlenQKVPackedFunc(_Applied): ...
