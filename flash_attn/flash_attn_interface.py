"""The public functions, under the module name that downstream packages import.

Names, order and defaults of the positional arguments are upstream's (flash-attn 2.8.3); what comes
after the `*` is ours.
"""

# Other packages reach the next two imports through this module.
from flash_attn import _positional as flash_attn_gpu  # noqa: F401
from flash_attn._functions import (  # noqa: F401
    _get_block_size_n,
    applied,
    maybe_contiguous,
    round_multiple,
)
from flash_attn._upstream import (  # noqa: F401
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
)
from flash_attn.attention import flash_attn_func, flash_attn_varlen_func
from flash_attn.kvcache import flash_attn_with_kvcache, flash_decode_func
from flash_attn.packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

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

# Upstream runs its Triton kernels for AMD where this is True.
USE_TRITON_ROCM = False

FlashAttnFunc = applied("FlashAttnFunc", flash_attn_func)
FlashAttnKVPackedFunc = applied("FlashAttnKVPackedFunc", flash_attn_kvpacked_func)
FlashAttnQKVPackedFunc = applied("FlashAttnQKVPackedFunc", flash_attn_qkvpacked_func)
FlashAttnVarlenFunc = applied("FlashAttnVarlenFunc", flash_attn_varlen_func)
FlashAttnVarlenKVPackedFunc = applied(
    "FlashAttnVarlenKVPackedFunc", flash_attn_varlen_kvpacked_func
)
FlashAttnVarlenQKVPackedFunc = applied(
    "FlashAttnVarlenQKVPackedFunc", flash_attn_varlen_qkvpacked_func
)
