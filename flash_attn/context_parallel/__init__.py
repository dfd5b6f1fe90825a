"""One sequence over many GPUs, on torch.distributed.

    q, k, v = (split(x, group) for x in (q, k, v))                  # this rank's tokens
    out = flash_attn_func(q, k, v, causal=True, group=group)        # and their output
    whole = join(out, group)

The functions are those of flash_attn over a process group or a DeviceMesh: exact, forward and
backward, on gloo with CPUs and on NCCL with GPUs.
"""

from flash_attn.context_parallel.decode import flash_decode_func
from flash_attn.context_parallel.hooks import serve_torch, transformers_attention
from flash_attn.context_parallel.interface import flash_attn_func, flash_attn_varlen_func
from flash_attn.context_parallel.merge import merge_attention
from flash_attn.context_parallel.schemes import choose_scheme
from flash_attn.context_parallel.tokens import join, position_ids, split

__all__ = [
    "choose_scheme",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_decode_func",
    "join",
    "merge_attention",
    "position_ids",
    "serve_torch",
    "split",
    "transformers_attention",
]
